"""Block ids of a trace as tokens: equal ids become equal runs, so that a prefix cache finds what the trace had.

Owns the runs and the share of blocks that a cache without limit would find. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from bench.workload.passages import draw_ids
from bench.workload.seeds import generator
from bench.workload.vocabulary import Vocabulary
from wire.errors import InvalidSetting

_MAX_TRIES = 100


def runs_of_blocks(
    block_ids: Sequence[Sequence[int]], num_tokens: int, vocabulary: Vocabulary, seed: int
) -> dict[int, tuple[int, ...]]:
    """A run of `num_tokens` for each id of the prompts' `block_ids`, no two the same.

    A run depends on the seed and on where in the trace its id comes first, not on how many rows are used.

    Raises:
        InvalidSetting: runs are too short for as many different ones as the trace has ids.
    """
    order = list(dict.fromkeys(chain.from_iterable(block_ids)))
    drawn = vocabulary.drawn_ids
    random = generator(seed, "blocks")
    indices = random.integers(0, len(drawn), size=(len(order), num_tokens), dtype=np.uint32)
    redraw = generator(seed, "blocks drawn again")
    runs: dict[int, tuple[int, ...]] = {}
    taken: set[tuple[int, ...]] = set()
    for block_id, row in zip(order, indices, strict=True):
        run = tuple(drawn[index] for index in row.tolist())
        for _ in range(_MAX_TRIES):
            if run not in taken:
                break
            run = draw_ids(vocabulary, num_tokens, redraw)
        else:
            raise InvalidSetting(
                f"--length-divisor leaves a block length of {num_tokens}, too short for {len(order)} different blocks "
                f"of {len(drawn)} tokens"
            )
        taken.add(run)
        runs[block_id] = run
    return runs


def prompt_ids(blocks: Iterable[int], runs: dict[int, tuple[int, ...]], num: int) -> tuple[int, ...]:
    """The first `num` tokens of the runs of `blocks`, one after the other."""
    return tuple(chain.from_iterable(runs[block_id] for block_id in blocks))[:num]


def reuse_share(block_ids: Iterable[Sequence[int]]) -> float:
    """Share of blocks that a cache without limit finds, prompts one after the other; only unbroken prefixes count."""
    seen: set[int] = set()
    num_found = num_blocks = 0
    for prompt in block_ids:
        num_found += next((index for index, block_id in enumerate(prompt) if block_id not in seen), len(prompt))
        num_blocks += len(prompt)
        seen.update(prompt)
    return num_found / num_blocks
