"""Tables of measured runs: what readers expect for each target and rate, where the time went, and what the client did.

Figures are medians over a target's rounds with their range; a run alone has no range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.plots.stack import PARTS, parts_of
from bench.report.document import Cell, Table, Tone, words
from bench.report.numbers import NONE, number, percent, rate, span, whole
from bench.report.results import Point, Ratio


@dataclass(frozen=True, slots=True)
class Metric:
    """A row: the figure's name in a result, and how it is called and written."""

    name: str
    label: str
    form: Callable[[float | None], str] = number


METRICS = (
    Metric("p50_ttft_ms", "TTFT p50 (ms)"),
    Metric("p90_ttft_ms", "TTFT p90 (ms)"),
    Metric("p99_ttft_ms", "TTFT p99 (ms)"),
    Metric("p50_tpot_ms", "TPOT p50 (ms)"),
    Metric("p99_tpot_ms", "TPOT p99 (ms)"),
    Metric("p99_itl_ms", "ITL p99 (ms)"),
    Metric("p99_max_itl_ms", "max ITL of a request p99 (ms)"),
    Metric("max_max_itl_ms", "ITL max (ms)"),
    Metric("p50_e2el_ms", "E2E p50 (ms)"),
    Metric("p99_e2el_ms", "E2E p99 (ms)"),
    Metric("output_throughput", "output tokens/s"),
    Metric("request_throughput", "requests/s done"),
    Metric("slo_attainment", "SLO attainment", percent),
    Metric("request_goodput", "goodput (requests/s)"),
    Metric("schedule_delay.p99_ms", "schedule delay p99 (ms)"),
)

MORE_IS_BETTER = frozenset({"output_throughput", "request_throughput", "slo_attainment", "request_goodput"})


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
        cells += [_ratio(known.pop((*pair, metric.name), None)) for pair in pairs]
        if any(cell.text not in ("", NONE) for cell in cells):
            rows.append((words(metric.label), *cells))
    sent = [sum(point.values("completed")) + sum(point.values("failed")) for point in own]
    failed = [Cell(f"{point.total('failed'):.0f} of {num:.0f}") for point, num in zip(own, sent, strict=True)]
    rows.append((words("failed requests"), *failed, *[Cell("")] * len(pairs)))
    for (target, against, name), ratio in known.items():
        blank = [Cell("")] * len(own)
        cells = [_ratio(ratio) if pair == (target, against) else Cell("") for pair in pairs]
        rows.append((words(name), *blank, *cells))
    heads = ("", *(point.target for point in own), *(f"{target} / {against}" for target, against in pairs))
    return Table("figures", own[0].pace, heads, tuple(rows), note=_rounds(own, with_ratios=bool(pairs)))


def _figure(point: Point, metric: Metric) -> Cell:
    text, ends = metric.form(point.middle(metric.name)), span(point.ends(metric.name), metric.form)
    return Cell(text, ends if ends != text else "")


def _ratio(ratio: Ratio | None) -> Cell:
    if ratio is None:
        return Cell("")
    return Cell(rate(ratio.ratio), f"{span((ratio.low, ratio.high), rate)}; {_said(ratio)}", tone_of(ratio))


def _said(ratio: Ratio) -> str:
    """The verdict in a word or two; the range beside it has the figures."""
    more, less = ("more", "less") if ratio.metric in MORE_IS_BETTER else ("slower", "faster")
    if ratio.is_clear:
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
    return "good" if (ratio.ratio > 1) == (ratio.metric in MORE_IS_BETTER) else "bad"


def _rounds(points: Iterable[Point], *, with_ratios: bool) -> str:
    of_ratios = "; ratios of these medians, with those of the lowest and highest pair" if with_ratios else ""
    most = max(len(point.runs) for point in points)
    return f"Medians of {most} rounds, with the lowest and highest round{of_ratios}." if most > 1 else ""


def breakdown_table(points: Sequence[Point]) -> Table | None:
    """Mean ms of each part of TTFT and TTST; None when nobody has a breakdown."""
    found = [point for point in points if parts_of(point, "ttft")]
    if not found:
        return None
    rows = []
    for point in sorted(found, key=lambda point: point.rate):
        first, second = parts_of(point, "ttft"), parts_of(point, "ttst")
        measured = [point.middle(f"breakdown.{token}.measured_mean_ms") for token in ("ttft", "ttst")]
        parts = [Cell(number(second.get(name, first.get(name)))) for name in PARTS]
        error = point.values("breakdown.ttft.largest_error") + point.values("breakdown.ttst.largest_error")
        totals = [Cell(number(value)) for value in measured]
        rows.append((words(point.label), *parts, *totals, Cell(_error(max(error, default=None)))))
    heads = ("", *(label for label, _ in PARTS.values()), "TTFT", "TTST", "largest error")
    return Table(
        "breakdown",
        "Where the time goes (mean ms)",
        heads,
        tuple(rows),
        note="TTFT is the sum of the first five; TTST of all but the fifth (return of token 1). Largest "
        "error: of any one request, sum of the parts against what the client measured.",
    )


def _error(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.2g} %"


def client_table(points: Sequence[Point]) -> Table:
    """Whether the load came as it should, and whether the client could have been the bottleneck (worst round)."""

    def worst(point: Point, name: str) -> float | None:
        return max(point.values(name), default=None)

    rows = tuple(
        (
            words(point.label),
            Cell(whole(sum(point.values("completed")))),
            Cell(whole(sum(point.values("failed")))),
            Cell(number(worst(point, "schedule_delay.p99_ms"))),
            Cell(number(worst(point, "schedule_delay.max_ms"))),
            Cell(percent(worst(point, "client.cpu_share"))),
            Cell(number(worst(point, "client.loop_lag_p99_ms"))),
            Cell(whole(worst(point, "client.num_late"))),
            Cell(number(min(point.values("chunks_per_token"), default=None))),
            Cell(whole(worst(point, "cached_tokens"))),
        )
        for point in sorted(points, key=lambda point: point.rate)
    )
    heads = (
        "",
        "answered",
        "failed",
        "schedule delay p99 (ms)",
        "delay max (ms)",
        "client CPU",
        "client lag p99 (ms)",
        "sent late",
        "chunks per token",
        "cached tokens",
    )
    note = "Requests of all rounds together; of everything else the worst round. Sent late: more than 10 ms."
    return Table("client", "Load and client", heads, rows, note=note)


def failure_table(points: Sequence[Point]) -> Table | None:
    """Failures by reason with an example; None without failures."""
    rows = []
    for point in points:
        counts: dict[str, float] = {}
        examples: dict[str, str] = {}
        for run in point.runs:
            messages = run.figures.get("failure_messages")
            texts = [str(text) for text in messages] if isinstance(messages, list) else []
            for reason, count in run.part("failures").items():
                counts[reason] = counts.get(reason, 0) + (count if isinstance(count, int) else 0)
                examples.setdefault(reason, next((text for text in texts if text.startswith(reason)), ""))
        for reason, count in counts.items():
            name = words(point.label)
            rows.append((name, Cell(reason), Cell(whole(count)), Cell(examples[reason].removeprefix(f"{reason}: "))))
    if not rows:
        return None
    heads = ("", "reason", "requests", "for example")
    return Table("failures", "Failures", heads, tuple(rows), words=frozenset({"reason", "for example"}))
