"""The limits for people, and as a file. Owns the words; what the figures are is in `bench.limits.result`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.facts import Facts
from bench.kv.report import plain_table
from bench.limits.result import Ceiling, Ratio
from bench.stats import NOISY_SPREAD

MEANINGS = {
    "decode_bw_ratio": "The share of the memory's read rate at which a decode step gets through weights and KV.",
    "attn_ratio": "The same for attention alone: KV bytes of a decode step over the time of all its layers.",
    "prefill_flop_ratio": "The share of the rate of bare matrix products at which a prompt is computed.",
    "kv_bw_ratio": "The rate of a whole handoff, bookkeeping included, over that of copying as many bytes.",
    "kv_overhead_us": "What a handoff takes beyond copying its bytes.",
    "exposed_ratio": "The share of a transfer that is left to wait for when the prompt is computed.",
    "handover_us": "From the moment the prefill node samples token 1 to the moment the client has it.",
    "router_us_per_token": "What each streamed token takes longer through the router than straight from its source.",
    "router_ttft_us": "What the first token takes longer through the router than straight from its source.",
    "router_cpu_s_per_1000_tokens": "Processor time of the router for 1000 streamed tokens.",
    "itl_isolation": "How much longer the slowest gaps between tokens get when prompts are computed beside them.",
}
"""One sentence a ratio."""

_CEILING_HEADS = ("the machine can", "value", "spread", "how")
_RATIO_HEADS = ("ratio", "case", "value", "range", "goal", "note")
_PROTOCOL = (
    "Ceiling and subject are measured in turns; value: ratio of medians, range: of the pairs. "
    f"noisy: the ceiling itself spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), so "
    "no value is shown."
)


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured, and a sentence for each part that failed."""

    ceilings: list[Ceiling] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def report(facts: Facts, setup: Mapping[str, Any], found: Found) -> str:
    """Everything that a run has to say. `setup`: model, cores, threads and the like."""
    sections = ["\n".join([*facts.describe(), ", ".join(f"{name} {value}" for name, value in setup.items())])]
    if found.ceilings:
        sections.append(plain_table(_CEILING_HEADS, [_ceiling_row(ceiling) for ceiling in found.ceilings]))
    if found.ratios:
        sections.append(plain_table(_RATIO_HEADS, [_ratio_row(ratio) for ratio in found.ratios]))
        shown = dict.fromkeys(ratio.name for ratio in found.ratios)
        sections.append("\n".join([*(f"{name}: {MEANINGS[name]}" for name in shown), _PROTOCOL]))
    if found.failures:
        sections.append("\n".join(found.failures))
    return "\n\n".join(sections)


def as_json(facts: Facts, setup: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """The file of a run: {"kind", "facts", "setup", "ceilings", "ratios", "failures"}."""
    return {"kind": "limits", "facts": asdict(facts), "setup": dict(setup), **asdict(found)}


def _ceiling_row(ceiling: Ceiling) -> list[str]:
    return [ceiling.name, f"{_number(ceiling.value)} {ceiling.unit}", f"{ceiling.spread:.0%}", ceiling.note]


def _ratio_row(ratio: Ratio) -> list[str]:
    value, limits = f"{_number(ratio.value)} {ratio.unit}".rstrip(), f"{_number(ratio.low)}-{_number(ratio.high)}"
    if ratio.noisy:
        value, limits = "-", "-"
    note = ", ".join(filter(None, ("noisy" * ratio.noisy, ratio.note)))
    return [ratio.name, ratio.case, value, limits, ratio.goal, note]


def _number(value: float) -> str:
    """Two digits or three, none of them behind the point from 100 on."""
    for limit, num_decimals in ((100, 0), (10, 1), (0.1, 2)):
        if abs(value) >= limit:
            return f"{value:.{num_decimals}f}"
    return f"{value:.3f}"
