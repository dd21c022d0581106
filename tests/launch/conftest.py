"""Fixtures: `supervise` and `endpoint`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.endpoint import FakeEndpoint, serving
from tests.launch.supervised import DRIVER, FAKE_CHILD, ROOT, WAIT_S, RunningSupervisor, Supervise


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    """`supervise([("router", "steady"), ...])` starts a supervisor over such children."""
    (tmp_path / "fake_child.py").write_text(FAKE_CHILD)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    started: list[RunningSupervisor] = []

    def start(
        children: list[tuple[str, ...]], start_timeout_s: float = WAIT_S, stop_timeout_s: float = WAIT_S
    ) -> RunningSupervisor:
        file = tmp_path / f"output-{len(started)}"
        arguments = json.dumps([children, start_timeout_s, stop_timeout_s])
        with file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, arguments], stdout=output, stderr=output, env=environment
            )
        started.append(RunningSupervisor(process, file))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.process.kill()
        supervisor.process.wait()
        for pid in supervisor.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    """A fake OpenAI-compatible endpoint."""
    with serving() as running:
        yield running
