"""Tables of results: figures for each target and rate, where the time went, limits of the machine.

Figures are medians over a target's rounds with their range; a run alone has no range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from baton.bench.documents import Configuration
from baton.bench.limits.result import Ceiling
from baton.bench.limits.result import Ratio as LimitRatio
from baton.bench.numbers import NONE, number, percent, rate, span, whole
from baton.bench.report.document import Cell, Table, Tone, table_of
from baton.bench.runs import METRIC_OF, METRICS, Metric, Point, Ratio

_SWEPT = (
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "p99_itl_ms",
    "p99_e2el_ms",
    "output_throughput",
    "schedule_delay.p99_ms",
)
_PARTS = {
    "client": "client and network",
    "router": "router",
    "queue_prefill": "waiting for prefill",
    "prefill": "prefill",
    "return": "return of token 1",
    "exposed_transfer": "exposed KV transfer",
    "queue_decode": "waiting for decode",
    "first_decode_step": "first decode step",
    "return_second": "return of token 2",
}
"""Parts of the time to tokens 1 and 2, in the order of time, and what they are called."""


def figure_tables(points: Sequence[Point], ratios: Sequence[Ratio] = ()) -> list[Table]:
    """A table for each rate: metrics down, targets across, then each pair of targets that has ratios."""
    return [_figures(rate_, points, ratios) for rate_ in sorted({point.rate for point in points})]


def _figures(rate_: float, points: Sequence[Point], ratios: Sequence[Ratio]) -> Table:
    own = [point for point in points if point.rate == rate_]
    known = {(ratio.target, ratio.against, ratio.metric): ratio for ratio in ratios if ratio.rate == rate_}
    pairs = list(dict.fromkeys((target, against) for target, against, _ in known))
    rows: list[list[Cell | str]] = []
    for metric in METRICS:
        cells = [_figure(point, metric) for point in own]
        cells += [_ratio(known.get((*pair, metric.name))) for pair in pairs]
        if any(cell.text not in ("", NONE) for cell in cells):
            rows.append([metric.label, *cells])
    failed = [f"{point.num_failed} of {point.num_requests}" for point in own]
    rows.append(["failed requests", *failed, *[""] * len(pairs)])
    heads = ("", *(point.target for point in own), *(f"{target} / {against}" for target, against in pairs))
    most = max(len(point.runs) for point in own)
    of_ratios = "; ratios of these medians, with those of the lowest and highest pair" if pairs else ""
    note = f"Medians of {most} rounds, with the lowest and highest round{of_ratios}." if most > 1 else ""
    return table_of("figures", own[0].pace, heads, rows, note=note)


def _figure(point: Point, metric: Metric) -> Cell:
    text, ends = metric.form(point.middle(metric.name)), span(point.ends(metric.name), metric.form)
    return Cell(text, ends if ends != text else "")


def _ratio(ratio: Ratio | None) -> Cell:
    if ratio is None:
        return Cell("")
    return Cell(rate(ratio.ratio), f"{span((ratio.low, ratio.high), rate)}; {ratio.verdict}", tone_of(ratio))


def tone_of(ratio: Ratio) -> Tone:
    """Good when the target does clearly better than what it is held against, bad when worse; muted without verdict."""
    if not ratio.is_clear:
        return "muted"
    return "good" if (ratio.ratio > 1) == METRIC_OF[ratio.metric].is_better_high else "bad"


def breakdown_table(points: Sequence[Point]) -> Table:
    """Mean ms of each part of TTFT and TTST, of those that have a breakdown."""
    rows = []
    for point in sorted(points, key=lambda point: point.rate):
        if parts := _parts_of(point, "ttft"):
            parts |= _parts_of(point, "ttst")
            totals = [point.middle(f"breakdown.{token}.measured_mean_ms") for token in ("ttft", "ttst")]
            errors = [error for token in ("ttft", "ttst") for error in point.values(f"breakdown.{token}.largest_error")]
            found = map(number, (*(parts.get(name) for name in _PARTS), *totals))
            rows.append([point.label, *found, f"{100 * max(errors):.2g} %" if errors else NONE])
    return table_of(
        "breakdown",
        "Where the time goes (mean ms)",
        ("", *_PARTS.values(), "TTFT", "TTST", "largest error"),
        rows,
        note="TTFT is the sum of the first five; TTST of all but the fifth (return of token 1). Largest error: of any "
        "one request, sum of the parts against what the client measured.",
    )


def _parts_of(point: Point, token: str) -> dict[str, float]:
    """Mean ms of each part over the runs; `token` is "ttft" or "ttst". {} without a breakdown."""
    found = {name: point.values(f"breakdown.{token}.parts.{name}.mean_ms") for name in _PARTS}
    return {name: fmean(values) for name, values in found.items() if values}


def failure_table(points: Sequence[Point]) -> Table:
    """Failures by reason with an example."""
    rows = []
    for point in points:
        counts = sum((Counter(run.part("failures")) for run in point.runs), Counter[str]())
        texts = [str(text) for run in point.runs for text in run.row("failure_messages")]
        for reason, count in counts.items():
            example = next((text.removeprefix(f"{reason}: ") for text in texts if text.startswith(reason)), "")
            rows.append((point.label, reason, whole(count), example))
    heads = ("", "reason", "requests", "for example")
    return table_of("failures", "Failures", heads, rows)


def goodput_table(configurations: Sequence[Configuration]) -> Table:
    """The best configuration first."""
    rows = []
    for each in sorted(configurations, key=lambda each: -(each.goodput_rate or 0.0)):
        lowest = min((point.rate for point in each.points), default=0.0)
        rows.append([each.name, f"{each.goodput_rate:g}" if each.goodput_rate else f"below {lowest:g}"])
    return table_of("goodput", "Goodput by configuration", ("configuration", "goodput (requests/s)"), rows)


def points_table(points: Sequence[Point]) -> Table:
    rows = [
        [
            *(point.target, f"{point.rate:g}", percent(point.middle("slo_attainment"))),
            *(number(point.middle(name)) for name in _SWEPT),
            whole(point.num_failed),
        ]
        for point in points
    ]
    heads = ("configuration", "requests/s", "attainment", *(METRIC_OF[name].label for name in _SWEPT), "failures")
    return table_of("points", "Every rate that was tried", heads, rows)


def limit_table(ratios: Sequence[LimitRatio]) -> Table:
    """A ratio whose yardstick was not steady is shown without its value."""
    rows: list[list[Cell | str]] = []
    for each in ratios:
        found = [Cell("noisy", tone="muted"), ""] if each.noisy else [_with_unit(each), span((each.low, each.high))]
        rows.append([each.name, each.case, *found, each.goal, each.note])
    heads = ("ratio", "case", "found", "range of pairs", "goal", "note")
    note = "Ratio of medians of values measured in turns. Noisy: the yardstick itself moved too much to say anything."
    return table_of("ratios", "How near Baton comes", heads, rows, note)


def ceiling_table(ceilings: Sequence[Ceiling]) -> Table:
    """What the machine could do in the same run."""
    rows = [(each.name, _with_unit(each), percent(each.spread), each.note) for each in ceilings]
    note = "Spread: 10th to 90th percentile of the rounds over their median."
    heads = ("ceiling", "found", "spread", "note")
    return table_of("ceilings", "What the machine can do", heads, rows, note)


def _with_unit(found: Ceiling | LimitRatio) -> str:
    return f"{number(found.value)} {found.unit}".strip()
