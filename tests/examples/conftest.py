"""One relay of the demo model for all examples that ask a server, and how an example is run."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from tests.system.harness import ROOT, Relay, start_relay

EXAMPLES = ROOT / "examples"
RunExample: TypeAlias = Callable[..., str]
"""Runs a script of `examples/` with these arguments, in this process; what it printed."""


def opened(model: Path, folder: Path, *, has_prefill: bool, name: str) -> Iterator[Relay]:
    """The body of a fixture: a relay of one decode node, and a prefill node where wanted."""
    prefill: tuple[tuple[str, ...], ...] = ((),) if has_prefill else ()
    relay = start_relay(model, folder, prefill=prefill, router=("--served-model-name", name))
    try:
        yield relay
        relay.settle()
        relay.stop()
    finally:
        relay.close()


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the demo model is served by a prefill node and a decode node."""
    folder = tmp_path_factory.mktemp("demo-relay")
    for relay in opened(checkpoint_path(), folder, has_prefill=True, name=DEMO_MODEL_NAME):
        yield relay.router.address


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """As `python examples/NAME ARGUMENTS` does it."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run
