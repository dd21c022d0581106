"""Which bytes of a block go from which rank to which, where ranks have pools of their own. Pure arithmetic.

Owns the plan of a handoff between nodes of any two divisions: every byte that a rank of D stores comes once, from one
rank of P that stores it. Where several ranks of P have the same head, the ranks of D take it from different ones.

A rank's block is that of the whole model, [planes, heads, block_size, head_dim] for each layer, cut to its layers and
heads and nothing between them: see `own_layout`. Of a state it has its channels of each row of inputs, and the matrices
of its heads. States are filled up, in a rank's block otherwise than in the whole one: nobody ever writes there, so it
is zero everywhere, and neither sent nor summed between nodes of different divisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from baton.wire.kv_shard import KvDivision, KvShard, own_layout
from baton.wire.layout import DTYPE_BYTES, STATE, KvLayout, LayerKv


@dataclass(frozen=True, slots=True)
class ByteRun:
    """`num_bytes` bytes of a block that are contiguous on both sides, at these offsets."""

    source: int
    target: int
    num_bytes: int

    def leads_to(self, following: ByteRun) -> bool:
        """Whether `following` goes on where this run ends, on both sides."""
        return (self.source + self.num_bytes, self.target + self.num_bytes) == (following.source, following.target)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One head in one plane of one layer, or one of equal parts of a row or of the matrices of a state: where it lies
    in a rank's block, and in the whole one. `num_copies`: how many ranks of a stage have it."""

    key: tuple[int, int, int]
    own: int
    whole: int
    num_bytes: int
    num_copies: int


def part_runs(layout: KvLayout, sources: KvDivision, target: KvShard) -> Mapping[KvShard, Sequence[ByteRun]]:
    """For each rank of `sources` from which `target` gets bytes: which bytes of the source's block go where in the
    target's. Raises `InvalidSetting` where it cannot be divided so.

    Together they are the target's block, each byte once, but for what states are filled up with. `layout` is that of
    the whole model.
    """
    if sources == target.division:
        return {target: [ByteRun(0, 0, own_layout(layout, target).block_bytes)]}
    num_parts = lcm(sources.num_ranks, target.division.num_ranks)
    held = {shard: {piece.key: piece for piece in _pieces(layout, shard, num_parts)} for shard in sources.shards}
    runs: dict[KvShard, list[ByteRun]] = {}
    for wanted in _pieces(layout, target, num_parts):
        holders = [shard for shard, pieces in held.items() if wanted.key in pieces]
        source = holders[target.rank % len(holders)]
        run = ByteRun(held[source][wanted.key].own, wanted.own, wanted.num_bytes)
        _append(runs.setdefault(source, []), run)
    return runs


def strands(layout: KvLayout, shard: KvShard) -> Mapping[int, Sequence[ByteRun]]:
    """A rank's bytes by how many ranks of its stage have the same: from its own block (source) to the whole one
    (target)."""
    found: dict[int, list[ByteRun]] = {}
    for piece in _pieces(layout, shard, shard.division.num_ranks):
        _append(found.setdefault(piece.num_copies, []), ByteRun(piece.own, piece.whole, piece.num_bytes))
    return dict(sorted(found.items()))


def _pieces(layout: KvLayout, shard: KvShard, num_parts: int) -> Iterator[_Piece]:
    """What a rank has of a block, in the order of its block. `num_parts`: into how many equal parts rows and matrices
    of states are cut; a multiple of the number of ranks."""
    own = own_layout(layout, shard)
    for number, layer in enumerate(shard.layers_of(layout.num_layers)):
        kv, mine = layout.layers[layer], own.layers[number]
        whole_begin = layout.layer_ends[layer] - layout.layer_bytes(kv)
        own_begin = own.layer_ends[number] - own.layer_bytes(mine)
        element_bytes = DTYPE_BYTES[layout.dtype]
        if kv.kind == STATE:
            for row, ((begin, count), (mine_begin, _)) in enumerate(zip(_rows(kv), _rows(mine), strict=True)):
                size, num_mine = count // num_parts * element_bytes, num_parts // shard.division.num_ranks
                for place in range(num_mine):
                    part, at = shard.rank * num_mine + place, own_begin + mine_begin * element_bytes + place * size
                    yield _Piece((layer, row, part), at, whole_begin + begin * element_bytes + part * size, size, 1)
            continue
        head_bytes, copies = layout.head_elements(kv) * element_bytes, shard.division.num_copies(kv.num_kv_heads)
        for plane in range(kv.num_planes):
            for place, head in enumerate(shard.heads_of(kv.num_kv_heads)):
                at = own_begin + (plane * mine.num_kv_heads + place) * head_bytes
                whole = whole_begin + (plane * kv.num_kv_heads + head) * head_bytes
                yield _Piece((layer, plane, head), at, whole, head_bytes, copies)


def _rows(kv: LayerKv) -> list[tuple[int, int]]:
    """Where each row of inputs begins in a state, and all its matrices together, with the number of elements."""
    rows = [(row * kv.head_dim, kv.head_dim) for row in range(kv.num_input_rows)]
    return [*rows, (kv.num_input_rows * kv.head_dim, kv.num_carried)] if kv.num_carried else rows


def _append(runs: list[ByteRun], run: ByteRun) -> None:
    if runs and runs[-1].leads_to(run):
        runs[-1] = ByteRun(runs[-1].source, runs[-1].target, runs[-1].num_bytes + run.num_bytes)
    else:
        runs.append(run)
