"""Percentiles, and ratios of values that were measured in turns.

On a machine that others use too, absolute values move; two things measured in turns move together, so their ratio is
what can be compared with another run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOISY_SPREAD = 0.15
"""Above this spread of the yardstick a run is called noisy."""


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
