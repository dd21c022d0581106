"""Which pictures can be drawn of which results. Nothing is drawn here: a picture is drawn when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from bench.kv.measure import Case
from bench.kv.report import handoffs_of
from bench.plots.gaps import draw_gaps, has_gaps
from bench.plots.rates import draw_attainment, draw_latency, has_attainment, has_rates
from bench.plots.stack import draw_stack, has_breakdown
from bench.plots.timeline import draw_timeline, has_times
from bench.plots.transfer import draw as draw_transfer
from bench.report.document import Picture
from bench.runs import Point, Run


def pictures_of_runs(points: Sequence[Point], slo_ms: Mapping[str, float], goal: float) -> Iterator[Picture]:
    """Those that the points have something for; `goal` is the share of requests that shall meet the SLO."""
    # what a gap may be: as the SLO says of the largest one, else of their mean
    limit_ms = slo_ms.get("itl", slo_ms.get("tpot"))
    if has_attainment(points):
        yield Picture("attainment", "SLO attainment against rate", partial(draw_attainment, points, slo_ms, goal))
    if has_rates(points):
        yield Picture("latency", "TTFT and ITL against rate", partial(draw_latency, points, slo_ms))
    if has_gaps(points):
        yield Picture("gaps", "Gaps between tokens", partial(draw_gaps, points, limit_ms))
    if has_breakdown(points):
        yield Picture("stack", "Parts of the time to tokens 1 and 2", partial(draw_stack, points))
    if runs := _side_by_side(points):
        yield Picture("timeline", "Requests over time", partial(draw_timeline, runs, limit_ms))


def picture_of_handoffs(cases: Sequence[Case]) -> Picture:
    """Rates of `bench kv`, at least one case."""
    lines = [handoffs_of(case) for case in cases]
    return Picture("transfer", "Rate of KV handoffs against their size", partial(draw_transfer, lines))


def _side_by_side(points: Sequence[Point]) -> list[Run]:
    """Of each target the last run that has its requests' times, at the highest rate at which most targets have one."""
    by_rate: dict[float, list[Run]] = {}
    for point in points:
        if found := [run for run in point.runs if has_times(run)]:
            by_rate.setdefault(point.rate, []).append(found[-1])
    return max(by_rate.values(), key=lambda runs: (len(runs), runs[0].rate), default=[])
