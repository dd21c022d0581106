"""What `baton bench limits` finds: ceilings of the machine, ratios of Baton to them, and what the ratios mean.

Owns the shapes and how samples become them. Does not know how anything was measured. Things that are compared are
measured in turns, so that whatever else the machine does meets both.
Invariant: every ratio has its `value`; where it is noisy, people are not shown it and files keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.stats import NOISY_SPREAD, median, paired_ratio, percentile, spread

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


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine can do. `spread`: between the 10th and 90th percentile of the rounds, over their median."""

    name: str
    value: float
    unit: str
    spread: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """What Baton does of it. `low` and `high`: of the pairs; `unit` "" for a plain ratio; `goal` "" where none is set.

    `case` says at which size or load ("batch 8, context 1024"). `noisy`: the value says nothing, as the yardstick
    itself moved too much, and is not shown to people.
    """

    name: str
    case: str
    value: float
    low: float
    high: float
    unit: str = ""
    goal: str = ""
    noisy: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured, and a sentence for each part that failed."""

    ceilings: list[Ceiling] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def ceiling_of(name: str, samples: Sequence[float], unit: str, note: str = "") -> Ceiling:
    """The median of a yardstick's rounds. Raises `ValueError` without samples."""
    return Ceiling(name, median(samples), unit, spread(samples), note)


def range_of(name: str, case: str, values: Sequence[float], unit: str, goal: str, note: str) -> Ratio:
    return Ratio(name, case, median(values), min(values), max(values), unit, goal, note=note)


def ratio_of(
    name: str, case: str, subject: Sequence[float], ceiling: Sequence[float], *, goal: str = "", note: str = ""
) -> Ratio:
    """Of values measured in turns, as many of each; noisy when the ceiling spreads by more than `NOISY_SPREAD`."""
    pairs = paired_ratio(subject, ceiling)
    noisy = spread(ceiling) > NOISY_SPREAD
    note = _joined(note, f"the ceiling spread by {spread(ceiling):.0%}" if noisy else "")
    return Ratio(name, case, pairs.of_medians, pairs.low, pairs.high, "", goal, noisy, note)


def difference_of(
    name: str, case: str, subject: Sequence[float], yardstick: Sequence[float], *, unit: str, note: str = ""
) -> Ratio:
    """How much longer the subject takes, of values measured in turns, as many of each.

    Noisy when the yardstick spreads by more than `NOISY_SPREAD`, unless that is little beside the difference itself.
    """
    pairs = [longer - shorter for longer, shorter in zip(subject, yardstick, strict=True)]
    value = median(subject) - median(yardstick)
    moved = percentile(yardstick, 90) - percentile(yardstick, 10)
    noisy = moved > NOISY_SPREAD * max(median(yardstick), abs(value))
    note = _joined(note, f"the yardstick moved by {moved:.3g} {unit}" if noisy else "")
    return Ratio(name, case, value, min(pairs), max(pairs), unit, "0", noisy, note)


def in_turns(
    num_rounds: int, ceiling: Callable[[], float], subject: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """`num_rounds` values of both, one first and then the other; a pair before them warms up and is forgotten."""
    pairs = [(ceiling(), subject()) for _ in range(1 + num_rounds)][1:]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _joined(*notes: str) -> str:
    return ", ".join(filter(None, notes))
