"""The limits of a step, and what follows from them: staging memory, and the batch sizes that graphs are recorded for.

Owns the arithmetic only, all of it pure. The scheduler keeps to the same limits.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from baton.device.staging import ALIGNMENT, staged_bytes
from baton.engine.attention.base import attention_staging_bytes
from baton.engine.runner.readings import MAX_KINDS
from baton.engine.runner.sampling_plan import sampling_bytes


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """No step has more sequences, tokens, or blocks of one sequence. A step in which all sequences decode is never too
    large.

    `spare_block`: a block of the KV tensor that is not in the pool. Padding reads and writes it; None: nothing is
    padded, and no graphs are recorded. `num_draft_blocks`: more of them, for the states behind as many drafts of a
    step; 0: there are no states, or no drafts.
    """

    max_num_seqs: int
    max_step_tokens: int
    max_blocks_per_request: int
    spare_block: int | None = None
    num_draft_blocks: int = 0


def staging_bytes(limits: RunnerLimits) -> int:
    """Staging memory that holds any step within `limits`: inputs, due rows and those that are read, attention's plan,
    sampling."""
    # token ids, positions and sources; rows that are read and as much for their kinds
    inputs = 5 * staged_bytes(limits.max_step_tokens, np.int64) + 2 * (MAX_KINDS - 1) * ALIGNMENT
    due_rows = staged_bytes(limits.max_num_seqs, np.int64)
    plan = attention_staging_bytes(limits.max_step_tokens, limits.max_num_seqs, limits.max_blocks_per_request)
    drafts = limits.num_draft_blocks
    # where they are and what they are, for as many requests as drafts; which blocks they reach, and their states
    drafted = 2 * staged_bytes(drafts * drafts, np.int64) + 6 * staged_bytes(2 * drafts, np.int64)
    return inputs + due_rows + -(-plan // ALIGNMENT) * ALIGNMENT + drafted + sampling_bytes(limits.max_num_seqs)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that decode graphs are recorded for, ascending: 1, 2, 4, 8, then every 8th up to 64, every 16th
    up to 256, every 32nd beyond, and `max_num_seqs` itself, so that every batch fits one."""
    regular = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32))
    return (*(size for size in regular if size < max_num_seqs), max_num_seqs)


def graph_size(sizes: tuple[int, ...], num_sequences: int) -> int | None:
    """The smallest of ascending `sizes` that `num_sequences` fit, None when they fit none."""
    place = bisect_left(sizes, num_sequences)
    return sizes[place] if place < len(sizes) else None
