"""Relays shared by the tests of this folder: a node takes seconds to start, so tests vary requests, not processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.system.harness import Relay, start_relay
from tests.system.reference import Reference

Checkpoints = Callable[[str], Path]
LLAMA_PREFILL = (
    ("--max-num-batched-tokens", "16"),
    ("--no-enable-prefix-caching", "--num-blocks", "40"),
)
LLAMA_DECODE = (
    ("--kv-transport", "shm"),
    ("--kv-transport", "zmq", "--no-enable-prefix-caching"),
    ("--kv-transport", "shm", "--num-blocks", "40"),
)
ROUND_ROBIN = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--local-prefill-tokens", "0")


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


@pytest.fixture(scope="session")
def llama_relay(
    checkpoints: Checkpoints, relays: list[Relay], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """Two prefill nodes (small chunks; large chunks without a prefix cache in a small pool) and three decode nodes
    (shm; zmq without a prefix cache; shm with a small pool), each request on the next of each."""
    relay = start_relay(
        checkpoints("llama"),
        tmp_path_factory.mktemp("llama-relay"),
        prefill=LLAMA_PREFILL,
        decode=LLAMA_DECODE,
        router=ROUND_ROBIN,
    )
    yield from running(relay, relays)


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
