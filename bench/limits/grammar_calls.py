"""What llguidance's own calls take: `python -m baton.bench.limits.grammar_calls [MODEL] [--shapes]`.

The floor of what a grammar costs: `baton.bench.limits.grammar_step` measures steps, this the library alone, for the
same grammars and a batch of outputs of tokens that are drawn uniformly from those allowed. First all of these are
accepted, then a token is refused before each, so that there is a mask. Each call is timed in a loop, and behind a sweep
over more memory than a cache of a core holds, as after a forward pass. Medians: a state of a grammar that is reached
first takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from baton.bench.limits.grammar_step import GRAMMARS, write_shapes
from baton.engine.models.identity import find_checkpoint
from baton.engine.structured.vocabulary import Vocabulary
from baton.wire.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

BATCH, NUM_TOKENS, SWEPT_BYTES = 8, 40, 8 * 2**20
_Result = TypeVar("_Result")


class Calls:
    """Times of calls by name, in seconds."""

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, call: Callable[[], _Result]) -> _Result:
        """What `call` returns."""
        begun_s = time.perf_counter()
        result = call()
        self._times[name].append(time.perf_counter() - begun_s)
        return result

    def medians(self) -> str:
        """One line, in microseconds."""
        return ", ".join(f"{name} {1e6 * statistics.median(times):.1f}" for name, times in self._times.items())


class Place(NamedTuple):
    """A token of an output, and one that cannot stand there; -1 where all can."""

    token_id: int
    refused: int


def walk(matcher: LLMatcher, num_tokens: int, chance: random.Random) -> list[Place]:
    """An output of `NUM_TOKENS` tokens."""
    places = []
    for _ in range(NUM_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")[:num_tokens]  # beyond these it would give up
        allowed, refused = np.flatnonzero(bits), np.flatnonzero(bits == 0)
        places.append(Place(int(chance.choice(allowed)), int(chance.choice(refused)) if len(refused) else -1))
        matcher.consume_token(places[-1].token_id)
    return places


def follow(matcher: LLMatcher, place: Place, calls: Calls, *, is_refused: bool) -> None:
    """What a step asks of a token, in its order."""
    if is_refused:
        if place.refused >= 0:
            calls.timed("refuse", lambda: matcher.try_consume_tokens([place.refused]))
        calls.timed("mask", matcher.compute_bitmask)
    name = "accept behind a mask" if is_refused else "accept"
    calls.timed(name, lambda: matcher.try_consume_tokens([place.token_id]))
    calls.timed("is complete", matcher.is_stopped)
    calls.timed("forced bytes", matcher.compute_ff_bytes)


def measure(vocabulary: Vocabulary, grammar: Grammar, *, is_refused: bool, sweeps: bool) -> Calls:
    """Of `BATCH` outputs, a token of each in turn."""
    first, chance, swept = vocabulary.compile(grammar), random.Random(0), np.zeros(SWEPT_BYTES, np.uint8)
    outputs = [walk(first.deep_copy(), vocabulary.tokens.vocab_size, chance) for _ in range(BATCH)]
    calls, matchers = Calls(), [first.deep_copy() for _ in outputs]
    for places in zip(*outputs, strict=True):
        if sweeps:
            swept += 1
        for matcher, place in zip(matchers, places, strict=True):
            follow(matcher, place, calls, is_refused=is_refused)
    return calls


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.grammar_calls", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="checkpoint; the demo model when absent")
    parser.add_argument("--shapes", action="store_true", help="as of baton.bench.limits.grammar_step")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = find_checkpoint(flags.model, weights=False)
        if flags.shapes:
            write_shapes(folder, Path(name))
            folder = Path(name)
        vocabulary = Vocabulary.from_folder(folder, {0})
    sys.stdout.write(f"microseconds, {vocabulary.tokens.vocab_size} tokens\n")
    for kind, grammar in GRAMMARS.items():
        for is_refused, sweeps in itertools.product((False, True), repeat=2):
            calls = measure(vocabulary, grammar, is_refused=is_refused, sweeps=sweeps)
            sys.stdout.write(f"{kind}, {'caches emptied' if sweeps else 'in a loop'}: {calls.medians()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
