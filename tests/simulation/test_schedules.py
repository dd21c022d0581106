"""Seeds of the simulated router and nodes, in parts that run in any process.

`python -m tests.simulation` runs as many as one likes, and one of them with everything that happens in it.
"""

from __future__ import annotations

import pytest

from tests.simulation.schedule import run_seeds

_NUM_SEEDS, _NUM_MIXED = 1500, 500
_PART = 250
"""A second or two: a process that takes one late keeps nobody waiting."""


@pytest.mark.parametrize("first", range(0, _NUM_SEEDS, _PART))
def test_every_stream_is_right_and_nothing_is_left(first: int) -> None:
    failures = run_seeds(range(first, first + _PART))
    assert not failures, str(failures[0])


@pytest.mark.parametrize("first", range(0, _NUM_MIXED, _PART))
def test_nodes_that_do_any_leg_and_change_what_they_prefer_break_no_stream(first: int) -> None:
    failures = run_seeds(range(first, first + _PART), is_mixed=True)
    assert not failures, str(failures[0])
