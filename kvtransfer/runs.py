"""Arithmetic of moves: which neighbouring blocks can move as one run, and which bytes of a block belong to which heads.

`heads_of` and `head_runs` have no caller in the product yet: ranks of one node share one pool of whole blocks. They are
for ranks with memory of their own, as GPUs have: `head_runs` says which bytes of a whole block belong to which rank.

Letters: L layers, H key-value heads of a rank, S slots of a block, D head size; a block is [L, 2, H, S, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.transports.base import Move
from wire.layout import KvLayout


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


@dataclass(frozen=True, slots=True)
class ByteRun:
    """`num_bytes` bytes of a block that are contiguous on both sides, at these offsets."""

    source: int
    target: int
    num_bytes: int

    def leads_to(self, source: int, target: int) -> bool:
        """Whether bytes at these offsets follow this run on both sides."""
        return (self.source + self.num_bytes, self.target + self.num_bytes) == (source, target)


def heads_of(rank: int, num_ranks: int, num_kv_heads: int) -> range:
    """The KV heads that one of `num_ranks` ranks holds. With more ranks than heads, neighbouring ranks hold the same
    head.

    No caller in the product yet: see the module.

    Raises `ValueError` when heads and ranks do not divide, or there is no such rank.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}")
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads cannot be split among {num_ranks} ranks")
    count = max(1, num_kv_heads // num_ranks)
    first = rank * num_kv_heads // num_ranks
    return range(first, first + count)


def head_runs(layout: KvLayout, source_heads: range, target_heads: range) -> list[ByteRun]:
    """The bytes of a block with `source_heads` that belong into a block with `target_heads`, in ascending order.

    No caller in the product yet: see the module.

    `layout` is that of the whole model; the blocks of both ranks have its shape but for the number of heads.
    """
    first, last = max(source_heads.start, target_heads.start), min(source_heads.stop, target_heads.stop)
    if last <= first:
        return []
    runs: list[ByteRun] = []
    source_plane = target_plane = 0
    for kv in layout.layers:
        head_bytes = layout.layer_bytes(kv) // (kv.num_planes * kv.num_kv_heads)
        for _ in range(kv.num_planes):
            source = source_plane + (first - source_heads.start) * head_bytes
            target = target_plane + (first - target_heads.start) * head_bytes
            source_plane += len(source_heads) * head_bytes
            target_plane += len(target_heads) * head_bytes
            num_bytes = (last - first) * head_bytes
            if runs and runs[-1].leads_to(source, target):
                runs[-1] = ByteRun(runs[-1].source, runs[-1].target, runs[-1].num_bytes + num_bytes)
            else:
                runs.append(ByteRun(source, target, num_bytes))
    return runs
