"""How fast something grows, from several lives of a program that each began anew.

The median of the slopes between every two samples of one life, over all lives, and Sen's interval for it: the seasonal
Kendall estimator of Hirsch and Slack, with a life for a season. What is held for a moment counts for nothing, nor does
the difference between lives. Samples that follow each other are taken for independent, so the interval is too narrow
for what goes up and down slowly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

_NORMAL_95 = 1.96
MIN_SAMPLES = 5
"""Lives with fewer samples say nothing."""


@dataclass(frozen=True, slots=True)
class Slope:
    """What comes in an hour, and between which two values that is with a confidence of 95 %."""

    hourly: float
    low: float
    high: float


def pooled_slope(lives: Sequence[Sequence[tuple[float, float]]]) -> Slope | None:
    """Of (seconds, value) in each life; None without a life that is long enough."""
    long_enough = [life for life in lives if len(life) >= MIN_SAMPLES]
    if not long_enough:
        return None
    slopes = sorted(
        3_600 * (late - early) / (late_s - early_s)
        for life in long_enough
        for (early_s, early), (late_s, late) in combinations(life, 2)
    )
    variance = sum(len(life) * (len(life) - 1) * (2 * len(life) + 5) / 18 for life in long_enough)
    half = _NORMAL_95 * math.sqrt(variance)
    low, high = (max(0, min(len(slopes) - 1, round((len(slopes) + side * half) / 2))) for side in (-1, 1))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])
