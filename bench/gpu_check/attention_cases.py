"""The grid of attention: which heads, blocks and batches every backend must get right.

Owns the grid. Knows no tensors: `bench.gpu_check.attention_process` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (128, 64)
GROUPS = (4, 1, 8, 7)
"""Query heads per key head."""
BLOCK_SIZES = (16, 32, 64)
NUM_KV_HEADS = 2
WINDOWS: tuple[int | None, ...] = (None, 37)
"""One entry a layer; every case runs all layers."""
BATCHES = ("decode", "prefill", "prefix", "mixed")

ERROR_BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}
"""Largest error of an element over the largest value of the exact result: rounding of weights and results."""


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence of a batch: tokens `start` .. `start + num_tokens - 1` are new.

    The KV of the first `num_shared` tokens lies in blocks of the nearest sequence before it that shares none: a prefix
    hit. Those tokens are older than the step in both.
    """

    start: int
    num_tokens: int
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One step. `group`: query heads per key head."""

    group: int
    block_size: int
    batch: str

    def __str__(self) -> str:
        return f"{self.batch}, group {self.group}, blocks of {self.block_size}"

    def shares(self) -> list[Share]:
        """The sequences of the step, at and around the borders of blocks."""
        size = self.block_size
        decodes = [Share(context - 1, 1) for context in (1, size - 1, size, size + 1, 3 * size + 5, 203)]
        prompts = [Share(0, length) for length in (2, size, size + 1, 150)]
        prefixes = [
            Share(2 * size, 3),
            Share(2 * size, 9, num_shared=2 * size),
            Share(2 * size, 1, num_shared=2 * size),
            Share(size + 3, 41),
            Share(4 * size, size),
        ]
        batches = {
            "decode": decodes,
            "prefill": prompts,
            "prefix": prefixes,
            "mixed": [*decodes[:3], *prompts[1:], *prefixes],
        }
        return batches[self.batch]


def attention_cases(*, quick: bool) -> list[AttentionCase]:
    """The grid for one dtype and head size. `quick` keeps every pair of a group and a batch, and of a block size and a
    batch, with one of three block sizes in turn.
    """
    cases = []
    for row, group in enumerate(GROUPS):
        for column, batch in enumerate(BATCHES):
            sizes = (BLOCK_SIZES[(row + column) % len(BLOCK_SIZES)],) if quick else BLOCK_SIZES
            cases += [AttentionCase(group, size, batch) for size in sizes]
    return cases
