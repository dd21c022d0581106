"""Counts of tiers outlive the nodes that have made them."""

from __future__ import annotations

from typing import Any, cast

from tests.campaign.tier_counts import TierCounts


class Counted:
    """Metrics of a node with a disk tier alone."""

    def __init__(self, loaded: int) -> None:
        self.loaded = loaded

    def value(self, name: str, **labels: str) -> int:
        if labels["tier"] != "disk":
            raise KeyError(name)
        return self.loaded if labels.get("end") == "loaded" else 3 if labels.get("reason") == "damaged" else 0


def _add(counts: TierCounts, pid: int, loaded: int) -> None:
    counts.add("decode-0", pid, cast(Any, Counted(loaded)))


def test_the_last_counts_of_each_life_are_summed_up() -> None:
    counts = TierCounts()
    for pid, loaded in ((1, 2), (1, 5), (2, 4)):
        _add(counts, pid, loaded)
    disk = {"stored": 0, "loaded": 9, "dropped": 0, "damaged": 6, "failed": 0, "silent": 0}
    assert counts.table() == {"disk": disk}
    assert "| disk | 0 | 9 | 0 | 6 | 0 | 0 |" in counts.summary()
    assert not counts.findings()


def test_where_nothing_was_loaded_nothing_was_tried() -> None:
    counts = TierCounts()
    _add(counts, 1, 0)
    assert counts.findings() == ["no block was loaded from any tier"]
