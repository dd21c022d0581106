"""Tables of results: figures for each target and rate, where the time went, what the client did, limits of the machine.

Figures are medians over a target's rounds with their range; a run alone has no range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.documents import Configuration
from bench.limits.result import Ceiling
from bench.limits.result import Ratio as LimitRatio
from bench.numbers import NONE, number, percent, rate, span, whole
from bench.plots.requests import PARTS, parts_of
from bench.report.document import Cell, Table, Tone, table_of, words
from bench.runs import METRIC_OF, METRICS, Metric, Point, Ratio

_SWEPT = {
    "TTFT p50 (ms)": "median_ttft_ms",
    "TTFT p99 (ms)": "p99_ttft_ms",
    "TPOT p50 (ms)": "median_tpot_ms",
    "TPOT p99 (ms)": "p99_tpot_ms",
    "ITL p99 (ms)": "p99_itl_ms",
    "E2E p99 (ms)": "p99_e2el_ms",
    "output tokens/s": "output_throughput",
}


def figure_tables(points: Sequence[Point], ratios: Sequence[Ratio] = ()) -> list[Table]:
    """A table for each rate: metrics down, targets across, then each pair of targets that has ratios."""
    return [_figures(rate_, points, ratios) for rate_ in sorted({point.rate for point in points})]


def _figures(rate_: float, points: Sequence[Point], ratios: Sequence[Ratio]) -> Table:
    own = [point for point in points if point.rate == rate_]
    known = {(ratio.target, ratio.against, ratio.metric): ratio for ratio in ratios if ratio.rate == rate_}
    pairs = list(dict.fromkeys((target, against) for target, against, _ in known))
    rows = []
    for metric in METRICS:
        cells = [_figure(point, metric) for point in own]
        cells += [_ratio(known.get((*pair, metric.name))) for pair in pairs]
        if any(cell.text not in ("", NONE) for cell in cells):
            rows.append((words(metric.label), *cells))
    failed = [Cell(f"{point.num_failed} of {point.num_requests}") for point in own]
    rows.append((words("failed requests"), *failed, *[Cell("")] * len(pairs)))
    heads = ("", *(point.target for point in own), *(f"{target} / {against}" for target, against in pairs))
    most = max(len(point.runs) for point in own)
    of_ratios = "; ratios of these medians, with those of the lowest and highest pair" if pairs else ""
    note = f"Medians of {most} rounds, with the lowest and highest round{of_ratios}." if most > 1 else ""
    return Table("figures", own[0].pace, heads, tuple(rows), note=note)


def _figure(point: Point, metric: Metric) -> Cell:
    text, ends = metric.form(point.middle(metric.name)), span(point.ends(metric.name), metric.form)
    return Cell(text, ends if ends != text else "")


def _ratio(ratio: Ratio | None) -> Cell:
    if ratio is None:
        return Cell("")
    return Cell(rate(ratio.ratio), f"{span((ratio.low, ratio.high), rate)}; {_said(ratio)}", tone_of(ratio))


def _said(ratio: Ratio) -> str:
    """The verdict in a word or two; the range beside it has the figures."""
    if ratio.is_clear:
        more, less = ("more", "less") if METRIC_OF[ratio.metric].is_better_high else ("slower", "faster")
        return more if ratio.ratio > 1 else less
    if ratio.ratio == 1:
        return "equal"
    if ratio.low <= 1 <= ratio.high:
        return "rounds disagree"
    if ratio.noise is not None and max(ratio.ratio, 1 / ratio.ratio) - 1 <= ratio.noise:
        return f"within noise of {ratio.noise:.0%}"
    return ratio.verdict


def tone_of(ratio: Ratio) -> Tone:
    """Good when the target does clearly better than what it is held against, bad when worse; muted without verdict."""
    if not ratio.is_clear:
        return "muted"
    return "good" if (ratio.ratio > 1) == METRIC_OF[ratio.metric].is_better_high else "bad"


def breakdown_tables(points: Sequence[Point]) -> list[Table]:
    """Mean ms of each part of TTFT and TTST; [] when nobody has a breakdown."""
    rows = []
    for point in sorted(points, key=lambda point: point.rate):
        first, second = parts_of(point, "ttft"), parts_of(point, "ttst")
        if first:
            parts = [Cell(number(second.get(name, first.get(name)))) for name in PARTS]
            totals = [Cell(number(point.middle(f"breakdown.{token}.measured_mean_ms"))) for token in ("ttft", "ttst")]
            errors = [point.worst(f"breakdown.{token}.largest_error") for token in ("ttft", "ttst")]
            error = max((error for error in errors if error is not None), default=None)
            rows.append((words(point.label), *parts, *totals, Cell(NONE if error is None else f"{100 * error:.2g} %")))
    heads = ("", *(label for label, _ in PARTS.values()), "TTFT", "TTST", "largest error")
    note = (
        "TTFT is the sum of the first five; TTST of all but the fifth (return of token 1). Largest "
        "error: of any one request, sum of the parts against what the client measured."
    )
    return [Table("breakdown", "Where the time goes (mean ms)", heads, tuple(rows), note=note)] if rows else []


def client_table(points: Sequence[Point]) -> Table:
    """Whether the load came as it should, and whether the client could have been the bottleneck (worst round)."""
    return table_of(
        "client",
        "Load and client",
        {
            "": lambda point: point.label,
            "answered": lambda point: whole(point.num_requests - point.num_failed),
            "failed": lambda point: whole(point.num_failed),
            "schedule delay p99 (ms)": lambda point: number(point.worst("schedule_delay.p99_ms")),
            "delay max (ms)": lambda point: number(point.worst("schedule_delay.max_ms")),
            "client CPU": lambda point: percent(point.worst("client.cpu_share")),
            "client lag p99 (ms)": lambda point: number(point.worst("client.loop_lag_p99_ms")),
            "sent late": lambda point: whole(point.worst("client.num_late")),
            "chunks per token": lambda point: number(min(point.values("chunks_per_token"), default=None)),
            "cached tokens": lambda point: whole(point.worst("cached_tokens")),
        },
        sorted(points, key=lambda point: point.rate),
        note="Requests of all rounds together; of everything else the worst round. Sent late: more than 10 ms.",
    )


def failure_tables(points: Sequence[Point]) -> list[Table]:
    """Failures by reason with an example; [] without failures."""
    rows = []
    for point in points:
        counts = sum((Counter(run.part("failures")) for run in point.runs), Counter[str]())
        texts = [str(text) for run in point.runs for text in run.row("failure_messages")]
        for reason, count in counts.items():
            example = next((text.removeprefix(f"{reason}: ") for text in texts if text.startswith(reason)), "")
            rows.append((words(point.label), Cell(reason), Cell(whole(count)), Cell(example)))
    heads = ("", "reason", "requests", "for example")
    return [Table("failures", "Failures", heads, tuple(rows), frozenset(heads[1::2]))] if rows else []


def goodput_table(configurations: Sequence[Configuration], points: Sequence[Point]) -> Table:
    """The best configuration first."""
    rows = []
    for each in sorted(configurations, key=lambda each: -(each.goodput_rate or 0.0)):
        tried = [point for point in points if point.target == each.name]
        best = next((point for point in tried if point.rate == each.goodput_rate), None)
        cells = _swept(best) if best else [Cell(NONE)] * (1 + len(_SWEPT))
        lowest = min((point.rate for point in tried), default=0.0)
        found = f"{each.goodput_rate:g}" if each.goodput_rate else f"below {lowest:g}"
        rows.append((words(each.name), Cell(found), *cells))
    heads = ("configuration", "goodput (requests/s)", "attainment there", *_SWEPT)
    return Table("goodput", "Goodput by configuration", heads, tuple(rows), frozenset({"configuration"}))


def points_table(points: Sequence[Point]) -> Table:
    """Every rate of every configuration."""
    rows = []
    for point in points:
        last = Cell(whole(point.num_failed)), Cell(number(point.middle("schedule_delay.p99_ms")))
        rows.append((words(point.target), Cell(f"{point.rate:g}"), *_swept(point), *last))
    heads = ("configuration", "requests/s", "attainment", *_SWEPT, "failures", "schedule delay p99 (ms)")
    return Table("points", "Every rate that was tried", heads, tuple(rows), frozenset({"configuration"}))


def _swept(point: Point) -> list[Cell]:
    attained = [share for run in point.runs for share in run.row("attainments")]
    ends = (min(attained), max(attained)) if len(attained) > 1 else None
    return [
        Cell(percent(point.middle("slo_attainment")), span(ends, percent)),
        *(Cell(number(point.middle(name))) for name in _SWEPT.values()),
    ]


def limit_table(ratios: Sequence[LimitRatio]) -> Table:
    """A ratio whose yardstick was not steady is shown without its value."""
    return table_of(
        "ratios",
        "How near Baton comes",
        {
            "ratio": lambda found: found.name,
            "case": lambda found: found.case,
            "found": lambda found: Cell("noisy", tone="muted") if found.noisy else _with_unit(found),
            "range of pairs": lambda found: "" if found.noisy else span((found.low, found.high)),
            "goal": lambda found: found.goal,
            "note": lambda found: found.note,
        },
        ratios,
        ("ratio", "case", "note"),
        "Ratio of medians of values measured in turns. Noisy: the yardstick itself moved too much to say anything.",
    )


def ceiling_table(ceilings: Sequence[Ceiling]) -> Table:
    """What the machine could do in the same run."""
    return table_of(
        "ceilings",
        "What the machine can do",
        {
            "ceiling": lambda found: found.name,
            "found": _with_unit,
            "spread": lambda found: percent(found.spread),
            "note": lambda found: found.note,
        },
        ceilings,
        ("ceiling", "note"),
        "Spread: 10th to 90th percentile of the rounds over their median.",
    )


def _with_unit(found: Ceiling | LimitRatio) -> str:
    return f"{number(found.value)} {found.unit}".strip()
