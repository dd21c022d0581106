"""`baton serve` as a user meets it: one command, one curl, one Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.harness import ROOT, START_TIMEOUT_S, Program, listening_ports, own_segments, wait_until


class Serve(Program):
    """`baton serve` on the demo model. `require_nothing_left` covers its children."""

    def __init__(self, folder: Path) -> None:
        super().__init__("serve", [sys.executable, "-m", "launch", "serve", "--port", "0"], folder)

    @property
    def endpoint(self) -> str:
        """What it announced; "" before."""
        lines = [line for line in self.out.splitlines() if line.startswith("Baton ready at ")]
        return lines[0].rsplit(" ", 1)[1] if lines else ""

    def children(self) -> list[psutil.Process]:
        """Every process it has started and that lives."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The child that runs `module`."""
        found = [child for child in self.children() if module in child.cmdline()]
        assert len(found) == 1, f"{module}: {found}"
        return found[0]

    def note_footprint(self) -> list[psutil.Process]:
        """Remember ports and segments of all children; returns them."""
        children = self.children()
        for child in children:
            self.ports |= listening_ports(child.pid)
            self.segments |= own_segments(child.pid)
        return children


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A running `baton serve`."""
    program = Serve(tmp_path)
    children: list[psutil.Process] = []
    try:
        wait_until(lambda: bool(program.endpoint) or not program.is_running, "serve announced itself", START_TIMEOUT_S)
        assert program.is_running, program.err
        yield program
    finally:
        if program.is_running:
            children = program.children()
        program.kill()
        for child in children:
            if child.is_running():
                os.kill(child.pid, signal.SIGKILL)


def chat(serve: Serve, content: str) -> str:
    """One chat request with curl, as the announcement suggests it; the text of the answer."""
    curl = next(line for line in serve.out.splitlines() if line.startswith("curl ")).replace("Hello!", content)
    answer = subprocess.run(["bash", "-c", curl + " -sS --max-time 30"], capture_output=True, check=True, cwd=ROOT)
    lines = [line.removeprefix("data: ") for line in answer.stdout.decode().splitlines() if line]
    assert lines[-1] == "[DONE]", answer.stdout.decode()
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content", "") for delta in deltas)


def test_serve_answers_restarts_a_killed_node_and_leaves_nothing(serve: Serve) -> None:
    assert chat(serve, "Hello!").strip()
    victim = serve.child("decode_node")
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: "is ready again" in serve.err, "the decode node is ready again", START_TIMEOUT_S)
    assert serve.child("decode_node").pid != victim.pid
    assert chat(serve, "What is the capital of France?").strip()
    children = serve.note_footprint()
    assert len(children) >= 3
    assert serve.ports
    assert serve.segments
    serve.signal(signal.SIGINT)
    assert serve.wait_exit() == 128 + signal.SIGINT
    serve.require_nothing_left(children)
