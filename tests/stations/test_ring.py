"""Stamps are in a file as soon as they are made, the last so many of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.stations import ring
from tests.stations.ring import Ring, Station, Waits
from tests.stations.stamps import Stamps


def test_stamps_can_be_read_while_they_are_made(tmp_path: Path) -> None:
    stamps = Ring(tmp_path / "node.stamps")
    assert len(Stamps(tmp_path, 0.0).rows("node")) == 0
    before_s = time.monotonic()
    stamps.add(Station.EMITTED, handoff=7, index=3)
    (row,) = Stamps(tmp_path, 0.0).rows("node")
    assert before_s <= row["moment_s"] <= time.monotonic()
    assert (row["station"], row["handoff"], row["index"]) == (Station.EMITTED, 7, 3)


def test_the_last_stamps_are_kept_and_a_new_life_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "NUM_STAMPS", 4)
    stamps = Ring(tmp_path / "node.stamps")
    for index in range(10):
        stamps.add(Station.EMITTED, index=index)
    assert [row["index"] for row in Stamps(tmp_path, 0.0).rows("node")] == [6, 7, 8, 9]
    Ring(tmp_path / "node.stamps")
    assert len(Stamps(tmp_path, 0.0).rows("node")) == 0


def test_who_waits_for_a_processor_is_told_how_long() -> None:
    waits = Waits()
    before_s = waits.own_s()
    assert before_s >= 0.0
    for _ in range(100):
        time.sleep(0)
    assert waits.own_s() >= before_s
