"""`baton serve` as a user meets it: one command, one curl, one Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.harness import ROOT, START_TIMEOUT_S, wait_until
from tests.system.serve import Serve, serving


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A running `baton serve` on the demo model, with its KV in shared memory."""
    with serving(tmp_path, "--device", "cpu") as program:
        yield program


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
    shown_before = serve.err
    serve.signal(signal.SIGINT)
    assert serve.wait_exit() == 0
    assert [line for line in serve.err[len(shown_before) :].splitlines() if "[baton] stopping" not in line] == []
    serve.require_nothing_left(children)
