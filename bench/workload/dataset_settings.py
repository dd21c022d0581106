"""Settings of the datasets, and what datasets make: conversations of one or more turns, before anybody knows an answer.

Flags that `vllm bench serve` has are named and mean as there; the others are ours. Owns the flags, the limits that
several datasets share and the shape that the client sends. A dataset checks its own flags when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.runtime.ranges import POSITIVE, SEED, Range
from baton.runtime.settings import setting

RANDOM, PREFIX_REPETITION, MULTI_TURN = "random", "prefix_repetition", "multi_turn"
SHAREGPT, CUSTOM, MOONCAKE, AZURE = "sharegpt", "custom", "mooncake", "azure"
DATASET_NAMES = (RANDOM, PREFIX_REPETITION, MULTI_TURN, SHAREGPT, CUSTOM, MOONCAKE, AZURE)
_GENERAL = "dataset"
_RANDOM = "random"
_PREFIX = "prefix"
_TURNS = "turns"
_SHAREGPT = "sharegpt"
_CUSTOM = "custom"
_TRACES = "traces"
OUTPUT_LEN_OF_FILE = -1
MAX_TOKENS = 2**24
"""Longest prompt, answer and count that anything may ask for: a wrong digit shall not fill the memory."""
TOKENS, TOKENS_OR_NONE, _RATIO = Range(1, MAX_TOKENS), Range(0, MAX_TOKENS), Range(0, 0.999)


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    dataset_name: str = setting(RANDOM, "what prompts are made of", choices=DATASET_NAMES)
    dataset_path: str = setting(
        "",
        "file of the dataset, for sharegpt, custom, mooncake and azure; empty: the bundled sample of a trace",
    )
    num_prompts: int = setting(
        1000,
        "requests to send, for multi_turn conversations; a trace gives what it has",
        allowed=TOKENS,
    )
    seed: int = setting(0, "the same seed makes the same prompts and arrivals", group=_GENERAL, allowed=SEED)
    disable_shuffle: bool = setting(False, "keep the order of a sharegpt or custom file", group=_GENERAL)
    no_oversample: bool = setting(
        False, "send less rather than repeat entries of a sharegpt or custom file", group=_GENERAL
    )
    input_len: int | None = setting(None, "the same as --random-input-len", allowed=TOKENS)
    output_len: int | None = setting(
        None, "output tokens of each request, whatever the dataset; traces keep theirs", allowed=TOKENS
    )
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
    prefix_repetition_prefix_len: int = setting(
        256, "tokens that the requests of a group share", group=_PREFIX, allowed=TOKENS_OR_NONE
    )
    prefix_repetition_suffix_len: int = setting(
        256, "tokens of each request of its own", group=_PREFIX, allowed=TOKENS_OR_NONE
    )
    prefix_repetition_num_prefixes: int = setting(10, "groups", group=_PREFIX, allowed=TOKENS)
    prefix_repetition_output_len: int = setting(128, "output tokens of each request", group=_PREFIX, allowed=TOKENS)
    multi_turn_num_turns: int = setting(4, "requests of each conversation", group=_TURNS, allowed=TOKENS)
    multi_turn_system_len: int = setting(
        128, "tokens of the system prompt that all conversations share", group=_TURNS, allowed=TOKENS_OR_NONE
    )
    multi_turn_user_len: int = setting(64, "tokens that the user adds in each turn", group=_TURNS, allowed=TOKENS)
    multi_turn_output_len: int = setting(64, "output tokens of each turn", group=_TURNS, allowed=TOKENS)
    multi_turn_range_ratio: float = setting(
        0.0, "as --random-range-ratio, for turns, user parts and outputs", group=_TURNS, allowed=_RATIO
    )
    sharegpt_output_len: int | None = setting(
        None, "output tokens of each request; none: those of the file's answer", group=_SHAREGPT, allowed=TOKENS
    )
    custom_output_len: int = setting(
        256,
        "output tokens of each request; -1: output_tokens of the file",
        group=_CUSTOM,
        allowed=Range(-1, MAX_TOKENS),
    )
    length_divisor: int = setting(1, "divide the lengths of a trace, rounded up", group=_TRACES, allowed=TOKENS)
    time_scale: float = setting(
        1.0, "multiply the times of a trace: 2 is half its rate", group=_TRACES, allowed=POSITIVE
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to its conversation, and how long its answer shall be.

    `token_ids` are sent where prompts are token ids, `text` where they are text or messages. A dataset fills both when
    it has a tokenizer; `text` is "" without one.
    """

    token_ids: tuple[int, ...]
    text: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other: turn k + 1 is sent when turn k is answered, and its prompt holds all before it.

    `arrival_s`: when a trace says that it came, from the beginning of the trace; None where an arrival process decides.
    """

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What a dataset makes: `conversations` to send, and `facts` that stand beside a result, as JSON has them.

    Lengths in the facts are of what each request adds, not of the history before it.
    """

    conversations: tuple[Conversation, ...]
    facts: dict[str, Any]
