"""Growth is told from the filling of tables, and from a life that was too short to say."""

from __future__ import annotations

import pytest

from tests.campaign.deployment import Footprint
from tests.campaign.growth import MIN_LIFE_S, MIN_SLOPE_LIFE_S, Growth


def judged(footprints: list[Footprint], lasts_s: float = 2 * MIN_LIFE_S) -> tuple[list[str], list[str]]:
    """Of one life with these at equal distances, over `lasts_s`."""
    growth = Growth()
    for number, footprint in enumerate(footprints):
        growth.add("decode-0", 7, number * lasts_s / (len(footprints) - 1), footprint)
    return growth.judged()


@pytest.mark.parametrize(
    ("files", "threads", "mib", "is_found"),
    [(0, 0, 0.0, False), (0.5, 0, 0.0, True), (0, 0.2, 0.0, True), (0, 0, 1.0, True), (0.1, 0.02, 0.2, False)],
    ids=["flat", "files", "threads", "memory", "little"],
)
def test_what_grows_to_the_end_is_found(files: float, threads: float, mib: float, is_found: bool) -> None:
    moments = range(60)
    footprints = [Footprint(int(20 + files * n), int(8 + threads * n), int((200 + mib * n) * 2**20)) for n in moments]
    lines, grown = judged(footprints)
    assert len(lines) == 1
    assert bool(grown) == is_found


@pytest.mark.parametrize(("lasts_s", "is_found"), [(MIN_SLOPE_LIFE_S, True), (MIN_SLOPE_LIFE_S - 1, False)])
def test_what_grows_slowly_is_found_in_a_life_of_half_an_hour(lasts_s: float, is_found: bool) -> None:
    footprints = [Footprint(20, 8, 200 * 2**20 + n * 2**17 + 2**24 * (n % 7 == 3)) for n in range(60)]
    lines, grown = judged(footprints, lasts_s)
    assert "an hour: +0.00 files, +0.00 threads, +1" in lines[0]
    assert bool(grown) == is_found


def test_what_fills_in_the_beginning_is_no_growth() -> None:
    footprints = [Footprint(20, 8, (200 + min(n, 18) * 20) * 2**20) for n in range(60)]
    assert judged(footprints)[1] == []


def test_a_short_life_is_not_judged() -> None:
    assert judged([Footprint(n, n, n * 2**24) for n in range(60)], MIN_LIFE_S - 1) == ([], [])
