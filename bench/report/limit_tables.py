"""Tables of `baton bench limits`: ratios to the machine's ceilings, and the ceilings themselves."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.document import Cell, Table, words
from bench.report.numbers import number, percent, span
from bench.report.results import Ceiling, LimitRatio


def limit_table(ratios: Sequence[LimitRatio]) -> Table:
    """A ratio whose yardstick was not steady is shown without its value."""
    rows = tuple(
        (
            words(ratio.name),
            Cell(ratio.case),
            Cell("noisy", tone="muted") if ratio.is_noisy else Cell(_with_unit(ratio.value, ratio.unit)),
            Cell("" if ratio.is_noisy else _range(ratio)),
            Cell(ratio.goal),
            Cell(ratio.note),
        )
        for ratio in ratios
    )
    heads = ("ratio", "case", "found", "range of pairs", "goal", "note")
    left = frozenset({"ratio", "case", "note"})
    note = "Ratio of medians of values measured in turns. Noisy: the yardstick itself moved too much to say anything."
    return Table("ratios", "How near Baton comes", heads, rows, words=left, note=note)


def ceiling_table(ceilings: Sequence[Ceiling]) -> Table:
    """What the machine could do in the same run."""
    rows = tuple(
        (
            words(ceiling.name),
            Cell(_with_unit(ceiling.value, ceiling.unit)),
            Cell(percent(ceiling.spread)),
            Cell(ceiling.note),
        )
        for ceiling in ceilings
    )
    heads = ("ceiling", "found", "spread", "note")
    note = "Spread: 10th to 90th percentile of the rounds over their median."
    return Table("ceilings", "What the machine can do", heads, rows, words=frozenset({"ceiling", "note"}), note=note)


def _with_unit(value: float | None, unit: str) -> str:
    return f"{number(value)} {unit}".strip()


def _range(ratio: LimitRatio) -> str:
    return "" if ratio.low is None or ratio.high is None else span((ratio.low, ratio.high))
