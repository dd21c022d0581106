"""Service level objectives: what makes a request a good one. Limits are in ms and inclusive, as in `vllm bench serve`.

An answer of one token has no TPOT and no gap, which counts as 0: it can only miss TTFT and E2E.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.serve.timing import Timing
from wire.errors import InvalidSetting

SLO_METRICS = ("ttft", "tpot", "itl", "e2el")


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """{metric: ms} of words like `ttft:200`, or several of them with commas between. Raises `InvalidSetting`."""
    found: dict[str, float] = {}
    for pair in (pair.strip() for word in words for pair in word.split(",")):
        name, _, limit = pair.partition(":")
        if name not in SLO_METRICS:
            raise InvalidSetting(f"--goodput {pair!r:.40}: expected METRIC:MS, METRIC one of {', '.join(SLO_METRICS)}")
        if name in found:
            raise InvalidSetting(f"--goodput {pair!r:.40}: {name} is there twice")
        found[name] = _limit_ms(limit, pair)
    return found


def meets(timing: Timing, slo: Mapping[str, float]) -> bool:
    """Whether a complete request keeps every limit of `slo`."""
    values_s = {
        "ttft": timing.ttft_s,
        "tpot": timing.tpot_s or 0.0,
        "itl": timing.max_gap_s or 0.0,
        "e2el": timing.e2el_s,
    }
    return all(values_s[name] <= limit_ms / 1000 for name, limit_ms in slo.items())


def _limit_ms(text: str, pair: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise InvalidSetting(f"--goodput {pair!r:.40}: the limit is not a number of milliseconds")
    return limit
