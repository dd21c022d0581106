"""Percentiles and ratios of values that were measured in turns, and numbers as people read them.

On a machine that others use too, absolute values move; two things measured in turns move together, so their ratio is
what can be compared with another run. People read three digits that matter, thousands apart; "-" where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NONE = "-"
NOISY_SPREAD = 0.15
"""Above this spread of the yardstick a run is called noisy."""


def number(value: float | None) -> str:
    """1,234; 123; 12.3; 1.23."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def whole(value: float | None) -> str:
    """1,234."""
    return NONE if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """58 %; one digit more near the ends, so that 99.6 % is not all."""
    if share is None:
        return NONE
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 1 or 99 <= value < 100 else f"{value:.0f} %"


def span(ends: tuple[float, float] | None, form: Callable[[float | None], str] = number) -> str:
    """1.20 to 1.45; "" for none."""
    if ends is None:
        return ""
    low, high = form(ends[0]), form(ends[1])
    return low if low == high else f"{low} to {high}"


def size(num_bytes: float) -> str:
    """24 GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def rate(value: float | None) -> str:
    """A ratio: 0.46, 1.82, 19.3, 120."""
    return NONE if value is None else f"{value:.3g}" if value >= 9.995 else f"{value:.2f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest. Raises `ValueError` without values."""
    if not values:
        raise ValueError("a percentile needs values")
    return float(np.percentile(values, percent))


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def spread(values: Sequence[float]) -> float:
    """How far apart the 10th and the 90th percentile are, over the median."""
    return (percentile(values, 90) - percentile(values, 10)) / median(values)


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of medians, and the lowest and highest ratio of any pair."""

    of_medians: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> PairedRatio:
    """Of values measured in turns, pair by pair. Raises `ValueError` for different numbers of them."""
    pairs = [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]
    return PairedRatio(median(numerators) / median(denominators), min(pairs), max(pairs))
