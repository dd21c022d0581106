"""Arithmetic of moves: which neighbouring blocks can move as one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvtransfer.transports.base import Move


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that lie next to each other on both sides, starting at `source` and `target`."""

    source: int
    target: int
    count: int


def coalesce(sources: Sequence[int], targets: Sequence[int], max_count: int) -> list[Run]:
    """Join moves sources[i] -> targets[i] that are adjacent on both sides into runs of at most `max_count` blocks."""
    runs: list[Run] = []
    first = 0
    for i in range(1, len(sources) + 1):
        is_joined = (
            i < len(sources)
            and i - first < max_count
            and sources[i] == sources[i - 1] + 1
            and targets[i] == targets[i - 1] + 1
        )
        if not is_joined:
            runs.append(Run(sources[first], targets[first], i - first))
            first = i
    return runs


def grant_pieces(moves: Sequence[Move], max_count: int) -> list[Sequence[Move]]:
    """Split `moves` into pieces of at most `max_count` moves that are consecutive in the grant."""
    pieces: list[Sequence[Move]] = []
    first = 0
    indexes = [move.index for move in moves]
    for run in coalesce(indexes, indexes, max_count):
        pieces.append(moves[first : first + run.count])
        first += run.count
    return pieces
