"""Loads on a real router, a small share of each: answers are whole and its memory is bounded."""

from __future__ import annotations

import pytest

from baton.bench.limits.router_load import GOAL_RSS_BYTES, LOADS, measure


@pytest.mark.parametrize(("load", "size", "answers"), [
    ("choices", 0.1, {"200": 3}),
    ("burst", 0.04, {"200": 200}),
])  # fmt: skip
def test_a_router_bears_a_small_load(load: str, size: float, answers: dict[str, int]) -> None:
    assert load in LOADS
    loaded = measure(load, size)
    assert loaded.answers == answers
    assert loaded.rss_bytes < GOAL_RSS_BYTES
    assert loaded.worst_s < 5.0
