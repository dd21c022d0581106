"""One pair of nodes with nixl agents in processes of their own, and the environment of tests that run one inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kvtransfer.transports.nixl.nixl_pair import NixlPair, preserved_environment


@pytest.fixture(scope="module")
def nodes() -> Iterator[NixlPair]:
    """64 blocks of 512 KiB on either side."""
    pair = NixlPair(64, 2**19)
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    with preserved_environment():
        yield


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch's allocator says that it has."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: found)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "native")
    return found
