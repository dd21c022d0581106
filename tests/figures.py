"""`python -m tests.figures`: tables and a chart of README and docs are written from the files that they are of.

Owns what stands on a page between `<!-- figures: NAME -->` and `<!-- end -->`, and docs/pictures/against-vllm.svg.
Measures nothing, and does not know the words around a table. Invariant: a second run changes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from baton.bench.documents import CompareDocument, load_result
from baton.bench.numbers import rate, whole
from baton.bench.runs import METRIC_OF, Metric, points_of
from tests.campaign.load import FAILED
from tests.campaign.results import summed
from tests.measured import rows_of, tables
from tests.soak.kept import GOAL_HOURS, LongGap, Part
from tests.soak.summary import hours, summary

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/faults.md",
    "docs/guides/split_or_not.md",
    "docs/kv_store.md",
    "docs/speculation.md",
)
_MEASURED = {"kv": "docs/kv_store.jsonl", "drafts": "docs/speculation.jsonl", "packed": "docs/packed.jsonl"}
CHART = "docs/pictures/against-vllm.svg"
_BLOCK = re.compile(r"(?<=<!-- figures: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Compared(NamedTuple):
    """A table of targets. A row is a load, which is its name, its result file and the rate there, and a metric."""

    targets: Sequence[str]
    rows: Iterable[tuple[tuple[str, str, float], str]]


_MAIN, _AT_ONCE = "llama-32m-placement", math.inf
_HEADS = {"vllm": "vLLM", "one": "one node", "split": "split", "adaptive": "one node with goals"}
_HEADS |= {"vllm-pd": "vLLM's split", "baton-pd": "split", "baton-colocated": "one node"}
_ALL, _OLDER = ("vllm", "one", "split", "adaptive"), ("vllm-pd", "baton-pd", "baton-colocated")
_LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")
_GOALS = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "request_goodput")
_TRACES = [(f"Mooncake, {end}", f"llama-32m-mooncake-{end}", _AT_ONCE) for end in ("1x", "2x", "3x")]
_MIXES = [(f"64 out, {at}/s", "llama-32m-mix", at) for at in (1, 3)]
_MIXES += [(f"12 out, {at}/s", "llama-32m-mix-short", at) for at in (4, 6)]
_FULL, _STEADY = ("all at once", _MAIN, _AT_ONCE), [(f"{at}/s", _MAIN, at) for at in (4, 8)]
_LAYOUTS = [(_FULL, "output_throughput"), *product(_STEADY, ("median_ttft_ms", "p99_itl_ms"))]
_LAYOUTS += [(_STEADY[-1], "request_goodput"), (_TRACES[-1], "request_goodput")]
TABLES = {
    "throughput": Compared(_ALL, [(_FULL, metric) for metric in ("output_throughput", *_LATENCIES)]),
    "latency": Compared(_ALL, [*product(_STEADY, _LATENCIES)]),
    "layouts": Compared(("one", "adaptive", "split"), _LAYOUTS),
    "traces": Compared(_ALL, [*product([*_TRACES, ("Azure", "llama-32m-azure", _AT_ONCE)], _GOALS)]),
    "mixes": Compared(_ALL[1:], [*product(_MIXES, _GOALS)]),
    "qwen3": Compared(_ALL[:2], [*product([(f"{at}/s", "qwen3-0.6b-256-32", at) for at in (0.5, 1)], _LATENCIES)]),
    "splits": Compared(_OLDER, [*product([(f"{at}/s", "llama-32m-512-64", at) for at in (1, 4, 6)], _LATENCIES)]),
}
_SUMMED = ("campaigns", "minutes", "faults", "random_bodies", "streamed_tokens", "requests")
_BARS = {
    "output tokens/s, all at once (more is better)": (_AT_ONCE, "output_throughput"),
    "median TTFT (ms) at 4/s (less is better)": (4, "median_ttft_ms"),
    "p99 gap (ms) at 4/s (less is better)": (4, "p99_itl_ms"),
}
_COLORS = {"vllm": "#8b949e", "one": "#0072b2", "split": "#009e73"}


@cache
def middles(file: str) -> Mapping[tuple[str, float, str], float]:
    """Medians of the rounds, by target, rate and metric."""
    document = load_result(ROOT / f"bench/results/{file}.json").document
    assert isinstance(document, CompareDocument)
    points = points_of(document.runs)
    return {(p.target, p.rate, name): middle for p in points for name in METRIC_OF if (middle := p.middle(name))}


def compared(name: str) -> str:
    """A table of `TABLES`: the best of each row is bold, and in brackets is how many times the first column's it is."""
    targets, of_rows = TABLES[name]
    rows = [_row(targets, load, METRIC_OF[metric]) for load, metric in of_rows]
    return _table(["", *(_HEADS[target] for target in targets)], rows)


def _row(targets: Sequence[str], load: tuple[str, str, float], metric: Metric) -> list[str]:
    name, file, at = load
    values = [middles(file)[target, at, metric.name] for target in targets]
    best = metric.form(max(values) if metric.is_better_high else min(values))
    cells = [f"**{text}**" if text == best else text for text in map(metric.form, values)]
    ratios = ["", *(f" ({rate(value / values[0])})" for value in values[1:])]
    return [f"{name}: {metric.label}", *(f"{cell}{ratio}" for cell, ratio in zip(cells, ratios, strict=True))]


def campaigns() -> str:
    """The sum of docs/campaigns.jsonl."""
    total = summed(map(json.loads, (ROOT / "docs/campaigns.jsonl").read_text().splitlines()))
    sums = {
        **{name.replace("_", " "): total[name] for name in _SUMMED},
        "requests: right to the end": total["ends"]["well"],
        "requests: left by their client": total["ends"]["left"],
        "requests: ended with an error": sum(total["ends"][end] for end in FAILED),
        "requests: with an error that the checks allow": total["excused"].total(),
        **{f"findings: {kind}": count for kind, count in total["findings"].items()},
    }
    return _table(["", "sum"], [(name, whole(count)) for name, count in sums.items()])


def soak() -> str:
    """The sum of docs/soak-NAME.json, each of one relay, and what the programs of each hold and grow by."""
    files = sorted((ROOT / "docs").glob("soak-*.json"))
    soaks = {path.stem.removeprefix("soak-"): _parts(json.loads(path.read_text())) for path in files}
    parts = [part for of_one in soaks.values() for part in of_one]
    sums = {
        "hours": f"{hours(parts):.2f} of {GOAL_HOURS:g}, in {len(parts)} parts of {len(soaks)} relays",
        **{name: whole(sum(sum(getattr(part, name).values()) for part in parts)) for name in ("faults", "requests")},
        "requests: ended with an error": whole(sum(part.requests.get(end, 0) for part in parts for end in FAILED)),
        "streamed tokens": whole(sum(part.num_tokens for part in parts)),
        "findings": whole(sum(len(part.findings) for part in parts)),
    }
    growth = [f"{name}: {line[2:]}" for name, of_one in soaks.items() for line in summary(of_one) if _is_program(line)]
    heads = "| program | last third of the last part | an hour more, between (with 95 % confidence) |\n|---|---|---|"
    return "\n".join([_table(["", "sum"], sums.items()), heads, *(f"| {line}" for line in growth), ""])


def _parts(document: Any) -> list[Part]:
    return [Part(**each | {"gaps": [LongGap(**gap) for gap in each["gaps"]]}) for each in document["parts"]]


def _is_program(line: str) -> bool:
    return line.startswith(("| router", "| prefill", "| decode"))


def measured() -> dict[str, Callable[[], str]]:
    """The tables of trials, by their names on the pages."""
    return {
        re.sub(r"\W+", "-", f"{prefix} {kind}"): partial(_table, rows[0], rows[1:])
        for prefix, file in _MEASURED.items()
        for kind, cells in tables((ROOT / file).read_text().splitlines()).items()
        for rows in [rows_of(kind, cells)]
    }


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ["---", *["---:"] * (len(heads) - 1)], *rows))


def filled(page: str) -> str:
    """The text of a page with its figures as their files have them. Raises `KeyError` for a name that nothing has."""
    figures: dict[str, Callable[[], str]] = {name: partial(compared, name) for name in TABLES}
    figures |= {"campaigns": campaigns, "soak": soak, **measured()}
    return _BLOCK.sub(lambda block: f"{block[1]}{block[2]}{figures[block[1]]()}", page)


def chart() -> str:
    """Three groups of bars, in colours that are seen on white and on black."""
    shapes = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 100" font-family="sans-serif" font-size="11">']
    for group, (title, (at, metric)) in enumerate(_BARS.items()):
        values = {target: middles(_MAIN)[target, at, metric] for target in _COLORS}
        shapes.append(_text(title, 250 * group, 14))
        for place, (target, value) in enumerate(values.items()):
            x, y, width = 250 * group + 58, 26 + 24 * place, 120 * value / max(values.values())
            shapes.append(f'<rect x="{x}" y="{y}" width="{width:.0f}" height="16" fill="{_COLORS[target]}"/>')
            shapes += [_text(_HEADS[target], x - 58, y + 12), _text(whole(value), x + 6 + width, y + 12)]
    return "\n".join([*shapes, "</svg>", ""])


def _text(text: str, x: float, y: float) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#768390">{text}</text>'


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(filled((ROOT / page).read_text()))
    (ROOT / CHART).write_text(chart())
