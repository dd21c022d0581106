"""Checkpoints, their references, and the claim that no test leaves a block behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.system.harness import Relay
from tests.system.reference import Reference

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(family)`: the folder of a tiny checkpoint, written once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_checkpoint(path, family)

    return checkpoint


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> Callable[[str], Reference]:
    """`references(family)`: the same checkpoint in transformers, loaded once."""
    known: dict[str, Reference] = {}

    def reference(family: str) -> Reference:
        if family not in known:
            known[family] = Reference(checkpoints(family))
        return known[family]

    return reference


@pytest.fixture(scope="session")
def relays() -> list[Relay]:
    """Every relay that runs now."""
    return []


@pytest.fixture(autouse=True)
def _nothing_leaks(relays: list[Relay]) -> Iterator[None]:
    """After every test, every block of every running relay is free or cached."""
    yield
    for relay in relays:
        relay.settle()


def running(relay: Relay, relays: list[Relay]) -> Iterator[Relay]:
    """The body of a fixture that owns `relay`."""
    relays.append(relay)
    try:
        yield relay
        relay.stop()
    finally:
        relays.remove(relay)
        relay.close()
