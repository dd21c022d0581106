"""The one-sample Kolmogorov-Smirnov test and the distribution functions that arrival gaps are held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_TINY = 1e-300


def largest_distance(values: Sequence[float], cdf: Callable[[float], float]) -> float:
    """D of the empirical distribution of `values` from `cdf`."""
    ordered = [cdf(value) for value in sorted(values)]
    num = len(ordered)
    return max(max((rank + 1) / num - share, share - rank / num) for rank, share in enumerate(ordered))


def critical_distance(num: int, alpha: float = 0.001) -> float:
    """D that samples of the distribution itself exceed with probability `alpha`, for large `num`."""
    return math.sqrt(-math.log(alpha / 2) / 2) / math.sqrt(num)


def gamma_cdf(shape: float, mean: float) -> Callable[[float], float]:
    """The distribution function of gamma variates of this shape and mean; shape 1 is exponential."""
    return lambda value: lower_incomplete_gamma(shape, value * shape / mean)


def lower_incomplete_gamma(shape: float, x: float) -> float:
    """Regularised, P(shape, x): its series (DLMF 8.7), or beyond shape + 1 the continued fraction of 1 - P (8.9)."""
    if x <= 0:
        return 0.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        for step in range(1, 500):
            term *= x / (shape + step)
            total += term
        return scale * total
    b = x + 1 - shape
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for step in range(1, 500):
        a = -step * (step - shape)
        b += 2
        d = 1 / (a * d + b or _TINY)
        c = b + a / c or _TINY
        fraction *= d * c
    return 1 - scale * fraction
