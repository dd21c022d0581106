"""Which bytes of a block go from which rank to which, where ranks have pools of their own. Pure arithmetic.

Owns the plan of a handoff between nodes of any two divisions: every byte that a rank of D stores comes once, from one
rank of P that stores it. Where several ranks of P have the same head, the ranks of D take it from different ones.

A rank's block is that of the whole model, [planes, heads, block_size, head_dim] for each layer, cut to its layers and
heads and nothing between them: see `own_layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from wire.kv_share import KvDivision, KvShare
from wire.layout import STATE, KvLayout, LayerKv


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
class _Head:
    """One head in one plane of one layer: where it lies in a rank's block, and in the whole one."""

    kv: LayerKv
    key: tuple[int, int, int]
    own: int
    whole: int
    num_bytes: int


def part_runs(layout: KvLayout, sources: KvDivision, target: KvShare) -> Mapping[KvShare, Sequence[ByteRun]]:
    """For each rank of `sources` from which `target` gets bytes: which bytes of the source's block go where in the
    target's. Together they are the target's block, each byte once. `layout` is that of the whole model."""
    held = {share: {head.key: head for head in _heads(layout, share)} for share in sources.shares}
    runs: dict[KvShare, list[ByteRun]] = {}
    for wanted in _heads(layout, target):
        holders = [share for share, heads in held.items() if wanted.key in heads]
        source = holders[target.rank % len(holders)]
        run = ByteRun(held[source][wanted.key].own, wanted.own, wanted.num_bytes)
        _append(runs.setdefault(source, []), run)
    return runs


def strands(layout: KvLayout, share: KvShare) -> Mapping[int, Sequence[ByteRun]]:
    """A rank's bytes by how many ranks of its stage have the same: from its own block (source) to the whole one
    (target)."""
    found: dict[int, list[ByteRun]] = {}
    for head in _heads(layout, share):
        copies = share.division.num_copies(head.kv.num_kv_heads)
        _append(found.setdefault(copies, []), ByteRun(head.own, head.whole, head.num_bytes))
    return dict(sorted(found.items()))


def _heads(layout: KvLayout, share: KvShare) -> Iterator[_Head]:
    """What a rank has of a block, in the order of its block."""
    layers = share.layers_of(layout.num_layers)
    own = 0
    for layer, (kv, end) in enumerate(zip(layout.layers, layout.layer_ends, strict=True)):
        if layer not in layers:
            continue
        layer_bytes = layout.layer_bytes(kv)
        if kv.kind == STATE:  # filled up, and never divided
            yield _Head(kv, (layer, 0, 0), own, end - layer_bytes, layer_bytes)
            own += layer_bytes
            continue
        head_bytes = layer_bytes // (kv.num_planes * kv.num_kv_heads)
        for plane in range(kv.num_planes):
            for head in share.heads_of(kv.num_kv_heads):
                whole = end - layer_bytes + (plane * kv.num_kv_heads + head) * head_bytes
                yield _Head(kv, (layer, plane, head), own, whole, head_bytes)
                own += head_bytes


def _append(runs: list[ByteRun], run: ByteRun) -> None:
    if runs and runs[-1].leads_to(run):
        runs[-1] = ByteRun(runs[-1].source, runs[-1].target, runs[-1].num_bytes + run.num_bytes)
    else:
        runs.append(run)
