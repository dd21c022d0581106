"""Which rate to try next, and which is the highest that is good enough: pure functions of the points measured so far.

The rate is doubled until it is not met, or halved until it is; then the gap between the two is cut at its geometric
middle until it is narrow enough. As nothing else is remembered, an interrupted search goes on from its points.

Noise can make a lower rate fail and a higher one pass. The answer is always the highest rate below every failing one,
so a lucky pass above a failure never counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DOUBLINGS = 12
"""How far the search goes up from the first rate."""
MAX_HALVINGS = 4
"""How far it goes down: half the rate takes twice the time, for an answer that nobody wants."""
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Point:
    """`attainment`: the share of requests at `rate` (requests/s) that met every goal."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Search:
    """`attainment`: the share that is asked for. `precision` 0.1: the answer is at most 10 % below a rate that failed.

    `rates`: try these and no others, if there are any.
    """

    attainment: float
    start_rate: float
    precision: float
    rates: tuple[float, ...] = ()


def next_rate(search: Search, points: Sequence[Point]) -> float | None:
    """The next rate to measure, None at the end."""
    tried = {point.rate for point in points}
    if search.rates:
        return next((rate for rate in search.rates if rate not in tried), None)
    if not points:
        return search.start_rate
    good, bad = _bounds(search, points)
    if bad is None:
        higher = 2 * max(tried)
        return higher if higher <= search.start_rate * 2**MAX_DOUBLINGS else None
    if good is None:
        lower = min(tried) / 2
        return lower if lower >= search.start_rate / 2**MAX_HALVINGS else None
    middle = _rounded(math.sqrt(good * bad))
    return middle if bad > good * (1 + search.precision) and good < middle < bad else None


def goodput_rate(search: Search, points: Sequence[Point]) -> float | None:
    """The highest rate that was met with none below it that was not; None for none."""
    return _bounds(search, points)[0]


def _bounds(search: Search, points: Sequence[Point]) -> tuple[float | None, float | None]:
    """The highest rate that was met below the lowest that failed, and that one."""
    bad = min((point.rate for point in points if point.attainment < search.attainment), default=None)
    below = [point.rate for point in points if bad is None or point.rate < bad]
    return max(below, default=None), bad


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
