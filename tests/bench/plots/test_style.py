from __future__ import annotations

from baton.bench.plots.style import looks_of


def test_targets_look_different_and_keep_their_look() -> None:
    looks = looks_of(["a", "b", "c", "a"])
    assert len({look.color for look in looks.values()}) == len({look.marker for look in looks.values()}) == 3
    assert looks_of(["a", "b"])["b"] == looks["b"]
