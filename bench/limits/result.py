"""What `baton bench limits` is asked for and finds: ceilings of the machine, ratios of Baton to them, what they mean.

Owns the settings, the shapes and how samples become them. Does not know how anything was measured. Things that are
compared are measured in turns, so that whatever else the machine does meets both.
Invariant: every ratio has its `value`; where it is noisy, people are not shown it and files keep it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.arguments import cores_in, names_in, numbers_in
from baton.bench.numbers import NOISY_SPREAD, median, paired_ratio, spread
from baton.engine.models.identity import model_name
from baton.runtime.ranges import COUNT, THREADS, Range
from baton.runtime.settings import setting

CEILING_NAMES = ("memcpy", "read_stream", "gemm")
NAMES = (*CEILING_NAMES, "decode_bw_ratio", "prefill_flop_ratio")
_QUICK_ROUNDS = 2
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES, _QUICK_BUFFER_BYTES = 2**27, 2**31, 2**22
TIMES_CACHE = 4
MEANINGS = {
    "decode_bw_ratio": "The share of the memory's read rate at which a decode step gets through weights and KV.",
    "prefill_flop_ratio": "The share of the rate of bare matrix products at which a prompt is computed.",
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


def ceiling_of(name: str, samples: Sequence[float], unit: str, note: str = "") -> Ceiling:
    """The median of a yardstick's rounds. Raises `ValueError` without samples."""
    return Ceiling(name, median(samples), unit, spread(samples), note)


def ratio_of(
    name: str, case: str, subject: Sequence[float], ceiling: Sequence[float], *, goal: str = "", note: str = ""
) -> Ratio:
    """Of values measured in turns, as many of each; noisy when the ceiling spreads by more than `NOISY_SPREAD`."""
    pairs = paired_ratio(subject, ceiling)
    noisy = spread(ceiling) > NOISY_SPREAD
    note = ", ".join(filter(None, (note, f"the ceiling spread by {spread(ceiling):.0%}" if noisy else "")))
    return Ratio(name, case, pairs.of_medians, pairs.low, pairs.high, "", goal, noisy, note)


def in_turns(
    num_rounds: int, ceiling: Callable[[], float], subject: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """`num_rounds` values of both, one first and then the other; a pair before them warms up and is forgotten."""
    pairs = [(ceiling(), subject()) for _ in range(1 + num_rounds)][1:]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@dataclass(frozen=True, slots=True)
class LimitsSettings:
    """Settings of `baton bench limits`. What is derived from them raises `InvalidSetting`."""

    model: str = setting("", "checkpoint folder or hub id; empty: the built-in demo model", positional=True)
    only: str = setting("", "measure only these, for example gemm,prefill_flop_ratio; empty: all")
    rounds: int = setting(9, "pairs of ceiling and subject, at least 7 for figures to publish", allowed=Range(2, 10**6))
    threads: int = setting(
        0, "compute threads of an engine; 0: what `baton serve` gives one of two nodes", allowed=THREADS
    )
    cores: str = setting("", "cores to use, the engine's first; empty: all")
    batches: str = setting("1,8,16", "requests that decode together")
    contexts: str = setting("512,1024", "tokens in front of the token that is decoded")
    prompt_tokens: int = setting(512, "length of the prompts of prefill_flop_ratio", allowed=COUNT)
    max_num_batched_tokens: int = setting(
        512, "tokens of prompts in an engine's step: the largest chunk", allowed=COUNT
    )
    cpu_kernels: str = setting("auto", "the engine's kernels, as in `baton serve`: compare auto with torch")
    json: str = setting("", "file for the results")
    quick: bool = setting(False, "tiny sizes and two rounds: whether it works, not how fast")

    def check(self) -> None:
        """Raise `InvalidSetting` when something cannot be used: before anything is started."""
        _ = (self.names, self.core_ids, self.batch_sizes, self.context_lens)

    @property
    def setup(self) -> dict[str, Any]:
        """What has to be said beside the figures."""
        setup = {"model": model_name(self.model, ""), "cores": list(self.core_ids), "threads": self.num_threads}
        return setup | {"rounds": self.num_rounds, "max_num_batched_tokens": self.max_num_batched_tokens}

    @property
    def core_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(cores_in(self.cores)))

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, len(self.core_ids) // 2)

    @property
    def num_rounds(self) -> int:
        return _QUICK_ROUNDS if self.quick else self.rounds

    @property
    def names(self) -> tuple[str, ...]:
        chosen = names_in(self.only, "--only", NAMES)
        return tuple(name for name in NAMES if not chosen or name in chosen)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return (1, 2) if self.quick else numbers_in(self.batches, "--batches")

    @property
    def context_lens(self) -> tuple[int, ...]:
        return (32,) if self.quick else numbers_in(self.contexts, "--contexts")

    @property
    def num_prompt_tokens(self) -> int:
        return min(64, self.prompt_tokens) if self.quick else self.prompt_tokens

    @property
    def buffer_bytes(self) -> int:
        """Of a buffer that no cache holds: four times the largest cache, from 128 MiB to 2 GiB."""
        size = min(max(_MIN_BUFFER_BYTES, TIMES_CACHE * last_cache_bytes()), _MAX_BUFFER_BYTES)
        return _QUICK_BUFFER_BYTES if self.quick else size


def last_cache_bytes(folder: Path = _CACHES) -> int:
    """Size of the largest cache of a core; 0 where the system does not tell."""
    sizes = [re.fullmatch(r"(\d+)K", file.read_text().strip()) for file in sorted(folder.glob("index*/size"))]
    return max((int(size[1]) * 2**10 for size in sizes if size), default=0)
