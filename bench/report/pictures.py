"""Which pictures can be drawn of which results. Nothing is drawn here: a picture is drawn when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from bench.kv.measure import Case
from bench.kv.plot import handoffs_of
from bench.plots import attainment, gaps, latency, stack, timeline, transfer
from bench.report.document import Picture
from bench.report.results import Point, Run


def pictures_of_runs(points: Sequence[Point], slo_ms: Mapping[str, float], goal: float) -> Iterator[Picture]:
    """Those that the points have something for; `goal` is the share of requests that shall meet the SLO."""
    targets = list(dict.fromkeys(point.target for point in points))
    if attainment.drawable(points):
        yield Picture(
            "attainment", "SLO attainment against rate", partial(attainment.draw, points, targets, slo_ms, goal)
        )
    if latency.drawable(points):
        yield Picture("latency", "TTFT and ITL against rate", partial(latency.draw, points, targets, slo_ms))
    if gaps.drawable(points):
        yield Picture("gaps", "Gaps between tokens", partial(gaps.draw, points, targets, _gap_limit_ms(slo_ms)))
    if stack.drawable(points):
        yield Picture("stack", "Parts of the time to tokens 1 and 2", partial(stack.draw, points))
    if runs := _side_by_side(points):
        yield Picture("timeline", "Requests over time", partial(timeline.draw, runs, _gap_limit_ms(slo_ms)))


def _gap_limit_ms(slo_ms: Mapping[str, float]) -> float | None:
    """What a gap may be: as the SLO says of the largest one, else of their mean; None when it says nothing of gaps."""
    return slo_ms.get("itl", slo_ms.get("tpot"))


def _side_by_side(points: Sequence[Point]) -> list[Run]:
    """Of each target the last run that has its requests' times, at the highest rate at which most targets have one."""
    by_rate: dict[float, list[Run]] = {}
    for point in points:
        if found := [run for run in point.runs if timeline.drawable([run])]:
            by_rate.setdefault(point.rate, []).append(found[-1])
    return max(by_rate.values(), key=lambda runs: (len(runs), runs[0].rate), default=[])


def picture_of_handoffs(cases: Sequence[Case]) -> Picture:
    """Rates of `bench kv`, at least one case."""
    lines = [handoffs_of(case) for case in cases]
    return Picture("transfer", "Rate of KV handoffs against their size", partial(transfer.draw, lines))
