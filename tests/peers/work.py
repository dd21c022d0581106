"""What a process of one engine is asked for, and what it answers.

Owns the flags, and the line of JSON for each value: {"case": "8x512", "value": 0.11}. Cases are prompts (seconds, the
best of two if they are short), decode steps (BATCHxCONTEXT, the median of seconds) and "perplexity". Imports the
standard library alone, because Pythons of other engines read it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NUM_STEPS, NUM_FIRST_STEPS = 24, 3
_NUM_PROMPTS, _LONG = 2, 1024
"""A prompt is computed twice, unless it is longer: then a moment's disturbance weighs less."""
SPARE_TOKENS = 64
"""Room of a sequence beyond its context."""
PERPLEXITY = "perplexity"
_LAST_ID = 7000
"""Of the tokens of random prompts: every model has as many."""


@dataclass(frozen=True)
class Work:
    """`text`: a file of windows of token ids whose perplexity is wanted. `rest`: flags of one engine alone."""

    model: str
    num_threads: int
    prompts: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    text: Path | None
    rest: tuple[str, ...] = ()

    @property
    def max_batch(self) -> int:
        return max([1, *(batch for batch, _ in self.steps)])

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence."""
        windows = map(len, self.windows())
        return max([*self.prompts, *(context for _, context in self.steps), *windows]) + SPARE_TOKENS

    def windows(self) -> list[list[int]]:
        return json.loads(self.text.read_text()) if self.text else []


class Engine(Protocol):
    """One model, ready to compute."""

    def prompt_s(self, token_ids: Sequence[int]) -> float:
        """Seconds from nothing to the token after a prompt."""
        ...

    def steps_s(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        """Seconds of each step with one token of every prompt's sequence. No KV is shared."""
        ...

    def log_probabilities(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Natural logarithms, of each token but the first, given those before."""
        ...


def work_of(arguments: Sequence[str]) -> Work:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="*", default=())
    parser.add_argument("--steps", nargs="*", default=(), metavar="BATCHxCONTEXT")
    parser.add_argument("--text", type=Path)
    known, rest = parser.parse_known_args(arguments)
    steps = tuple((int(batch), int(context)) for batch, _, context in (each.partition("x") for each in known.steps))
    return Work(known.model, known.threads, tuple(known.prompts), steps, known.text, tuple(rest))


def say(case: str, value: float) -> None:
    sys.stdout.write(json.dumps({"case": case, "value": value}) + "\n")
    sys.stdout.flush()


def measure(open_engine: Callable[[Work], Engine]) -> None:
    """Do what the command line asks for, in this process."""
    work = work_of(sys.argv[1:])
    engine = open_engine(work)
    for length in work.prompts:
        num_prompts = _NUM_PROMPTS if length <= _LONG else 1
        say(f"{length}", min(engine.prompt_s(random_ids(length, seed)) for seed in range(num_prompts)))
    for batch, context in work.steps:
        prompts = [random_ids(context, seed) for seed in range(batch)]
        times_s = engine.steps_s(prompts, NUM_FIRST_STEPS + NUM_STEPS)
        say(f"{batch}x{context}", statistics.median(times_s[NUM_FIRST_STEPS:]))
    if windows := work.windows():
        say(PERPLEXITY, perplexity([engine.log_probabilities(window) for window in windows]))


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, _LAST_ID), k=count)


def perplexity(found: Sequence[Sequence[float]]) -> float:
    """Over the second half of each window, whose tokens have at least half a window before them. So does
    llama.cpp."""
    scored = [value for window in found for value in window[(len(window) + 1) // 2 :]]
    return math.exp(-statistics.fmean(scored))
