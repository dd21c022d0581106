"""Databases of both kinds, and their clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.router.http.stored.database import Database
from tests.router.http.stored.turns import KEEP_S, MAX_BYTES, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "file"])
def database(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Database]:
    found = Database(tmp_path / "store" if request.param == "file" else None, MAX_BYTES, KEEP_S, clock)
    yield found
    found.close()
