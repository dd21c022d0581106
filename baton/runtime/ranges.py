"""The numbers that a setting may have, declared beside its field: parsing refuses others, and `--help` shows them.

Owns the ranges that many settings share. A time has an end because the system's waits do: a poll counts milliseconds in
32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `least` to `most`, both included; without `least` itself when it `excludes_least`. NaN is in no
    range."""

    least: float
    most: float
    excludes_least: bool = False

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and not (self.excludes_least and number == self.least)

    def __str__(self) -> str:
        least, most = _shown(self.least), _shown(self.most)
        return f"above {least}, {most} at most" if self.excludes_least else f"from {least} to {most}"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


ANY = Range(-math.inf, math.inf)
COUNT = Range(1, 2**31 - 1)
COUNT_OR_NONE = Range(0, 2**31 - 1)
SEED = Range(0, 2**63 - 1)
BYTES = Range(1, 2**63 - 1)
BYTES_OR_NONE = Range(0, 2**63 - 1)
PORT = Range(0, 65535)
THREADS = Range(0, 1024)
POSITIVE = Range(0, 10**9, excludes_least=True)
SHARE = Range(0, 1, excludes_least=True)
SHARE_OR_NONE = Range(0, 1)
SECONDS = Range(0, 10**6, excludes_least=True)
SECONDS_OR_NONE = Range(0, 10**6)
MILLISECONDS = Range(0, 10**9)
