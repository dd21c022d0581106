"""Settings of the datasets, and what datasets make: prompts, and when a trace says that they came.

Flags that `vllm bench serve` has are named and mean as there; the others are ours. Owns the flags, the limits that
several datasets share and the shape that the client sends. A dataset checks its own flags when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.runtime.ranges import POSITIVE, SEED, Range
from baton.runtime.settings import setting

DATASET_NAMES = RANDOM, MOONCAKE, AZURE = "random", "mooncake", "azure"
_GENERAL = "dataset"
_RANDOM = "random"
_TRACES = "traces"
MAX_TOKENS = 2**24
"""Longest prompt, answer and count that anything may ask for: a wrong digit shall not fill the memory."""
TOKENS, TOKENS_OR_NONE, _RATIO = Range(1, MAX_TOKENS), Range(0, MAX_TOKENS), Range(0, 0.999)


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    dataset_name: str = setting(RANDOM, "source of the prompts", choices=DATASET_NAMES)
    dataset_path: str = setting("", "file of mooncake or azure; empty: the bundled sample")
    num_prompts: int = setting(1000, "requests to send; a trace gives what it has", allowed=TOKENS)
    seed: int = setting(0, "the same seed makes the same prompts and arrivals", group=_GENERAL, allowed=SEED)
    random_input_len: int = setting(
        1024, "input tokens of each request, without the prefix", group=_RANDOM, allowed=TOKENS_OR_NONE
    )
    random_output_len: int = setting(128, "output tokens of each request", group=_RANDOM, allowed=TOKENS)
    random_range_ratio: float = setting(
        0.0, "lengths are uniform in [len * (1 - ratio), len * (1 + ratio)]; below 1", group=_RANDOM, allowed=_RATIO
    )
    random_prefix_len: int = setting(
        0, "tokens before the random ones, the same in all requests", group=_RANDOM, allowed=TOKENS_OR_NONE
    )
    random_long_share: float = setting(
        0.0, "share of requests, at random places, with long inputs", group=_RANDOM, allowed=_RATIO
    )
    random_long_input_len: int = setting(3000, "input tokens of these", group=_RANDOM, allowed=TOKENS_OR_NONE)
    length_divisor: int = setting(1, "divide the lengths of a trace, rounded up", group=_TRACES, allowed=TOKENS)
    time_scale: float = setting(
        1.0, "multiply the times of a trace: 2 is half its rate", group=_TRACES, allowed=POSITIVE
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks, and how long its answer shall be.

    `token_ids` are sent where prompts are token ids, `text` where they are text or messages. A dataset fills both when
    it has a tokenizer; `text` is "" without one. `arrival_s`: when a trace says that it came, from the beginning of the
    trace; None where an arrival process decides.
    """

    token_ids: tuple[int, ...]
    text: str
    num_output_tokens: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What a dataset makes: `prompts` to send, and `facts` that stand beside a result, as JSON has them."""

    prompts: tuple[Prompt, ...]
    facts: dict[str, Any]
