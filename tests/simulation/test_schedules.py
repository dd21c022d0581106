"""Seeds of the simulated router and nodes, in parts that run in any process.

`python -m tests.simulation` runs as many as one likes, and one of them with everything that happens in it.
"""

from __future__ import annotations

import pytest

from tests.simulation.schedule import run_seeds

_NUM_SEEDS, _NUM_MIXED = 720, 180
_NUM_PARTS, _NUM_MIXED_PARTS = 10, 3


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_every_stream_is_right_and_nothing_is_left(part: int) -> None:
    failures = run_seeds(range(part, _NUM_SEEDS, _NUM_PARTS))
    assert not failures, str(failures[0])


@pytest.mark.parametrize("part", range(_NUM_MIXED_PARTS))
def test_nodes_that_do_any_leg_and_change_what_they_prefer_break_no_stream(part: int) -> None:
    failures = run_seeds(range(part, _NUM_MIXED, _NUM_MIXED_PARTS), is_mixed=True)
    assert not failures, str(failures[0])
