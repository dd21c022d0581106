"""How much longer the subject takes than its yardstick: for what a ratio would not say well.

Knows no benchmark. The yardstick is measured in turns with the subject, so both meet the same disturbances.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.limits.result import Ratio
from bench.stats import NOISY_SPREAD, median, percentile


def difference_of(
    name: str,
    case: str,
    subject: Sequence[float],
    yardstick: Sequence[float],
    *,
    unit: str,
    goal: str = "0",
    note: str = "",
) -> Ratio:
    """Of values measured in turns: subject less yardstick, by medians, with the range of the pairs.

    Noisy when the yardstick spreads by more than `NOISY_SPREAD`, unless that is little beside the difference itself.
    Raises `ValueError` for different numbers of values, or none.
    """
    pairs = [longer - shorter for longer, shorter in zip(subject, yardstick, strict=True)]
    value = median(subject) - median(yardstick)
    moved = percentile(yardstick, 90) - percentile(yardstick, 10)
    noisy = moved > NOISY_SPREAD * median(yardstick) and moved > NOISY_SPREAD * abs(value)
    if noisy:
        note = ", ".join(filter(None, (note, f"the yardstick moved by {moved:.3g} {unit}")))
    return Ratio(name, case, value, min(pairs), max(pairs), unit, goal, noisy, note)
