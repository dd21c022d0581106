"""Paged attention by Baton's own CPU kernels: they read the blocks where they lie, nothing is gathered.

Owns a step's index arrays and the scratch of the kernels. Knows no requests and no scheduling. Host memory only.

Letters: T tokens of the step, N sequences, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device.base import Array, Staging
from engine.attention.base import PLAIN, LayerRule, LayerStored, SequenceShare
from engine.attention.paged_kv import PagedKv
from engine.native.arguments import DTYPES, BatonAttention, BatonPagedKv, BatonStep, BatonStore
from engine.native.library import Kernels
from engine.native.recording import Recording


class _StepArrays:
    """The index arrays of a step, all int64. They stay where they are from step to step, so that the arguments of a
    layer's calls stay the same.

    slots: [T], counted through the pool; first_token, start, num_tokens, table_begin: [N]; tables: the blocks of one
    sequence after another.
    """

    def __init__(self, max_tokens: int, max_sequences: int, max_blocks: int) -> None:
        self.slots = np.empty(max_tokens, dtype=np.int64)
        self.first_token, self.start, self.num_tokens, self.table_begin = np.empty((4, max_sequences), dtype=np.int64)
        self.tables = np.empty(max_blocks, dtype=np.int64)

    def hold(self, num_tokens: int, num_sequences: int, num_blocks: int) -> bool:
        """Whether a step of this size has room."""
        room = (len(self.slots), len(self.start), len(self.tables))
        return all(size <= held for size, held in zip((num_tokens, num_sequences, num_blocks), room, strict=True))

    def fill(self, shares: Sequence[SequenceShare], num_blocks: Array, block_size: int) -> None:
        """The step over `shares`, of which each uses `num_blocks` [N] blocks."""
        count = len(shares)
        start = np.array([share.start for share in shares], dtype=np.int64)
        num_tokens = np.array([share.num_tokens for share in shares], dtype=np.int64)
        ends, table_ends = np.cumsum(num_tokens), np.cumsum(num_blocks)
        for share, end, used in zip(shares, table_ends.tolist(), num_blocks.tolist(), strict=True):
            self.tables[end - used : end] = share.block_table[:used]
        first_token, table_begin = ends - num_tokens, table_ends - num_blocks
        # the position of each token, and its block among the tables of all
        positions = np.arange(ends[-1]) + np.repeat(start - first_token, num_tokens)
        blocks = self.tables[np.repeat(table_begin, num_tokens) + positions // block_size]
        self.slots[: len(blocks)] = blocks * block_size + positions % block_size
        self.first_token[:count], self.start[:count] = first_token, start
        self.num_tokens[:count], self.table_begin[:count] = num_tokens, table_begin


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The arguments of one layer's calls, of which a step changes those that belong to its tokens."""

    store: BatonStore
    attention: BatonAttention


def layer_kv(pool: PagedKv, number: int) -> BatonPagedKv:
    """The keys and values of a layer as the kernels take them; valid as long as somebody holds the pool's blocks."""
    view, kv = pool.layer(number), pool.layout.layers[number]
    return BatonPagedKv(
        view[:, 0].data_ptr(),
        view[:, -1].data_ptr(),  # of latents the key is the value
        view.stride(0),
        kv.num_kv_heads,
        pool.layout.block_size,
        kv.head_dim,
        DTYPES[pool.blocks.dtype],
    )


class NativeAttention:
    """Attention over one KV pool. One instance serves one runner, whose decoder computes with the same `Kernels`."""

    def __init__(self, kernels: Kernels, pool: PagedKv, num_heads: int, rules: Sequence[LayerRule] = ()) -> None:
        """`rules`: of each layer, all plain; none: the default for all."""
        self._rules = rules or [PLAIN] * pool.layout.num_layers
        self._kernels = kernels
        self._blocks = pool.blocks  # the addresses below stay valid as long as somebody holds it
        self._block_size = pool.layout.block_size
        self._num_heads = num_heads
        self._layers = [self._layer(pool, layer) for layer in range(len(pool.layout.layers))]
        self._largest_head = max(kv.head_dim for kv in pool.layout.layers)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arrays = _StepArrays(0, 0, 0)
        self._step = BatonStep()
        self._num_sequences = 0
        self._num_tokens = 0
        self._layer_stored: LayerStored | None = None
        self.num_positions = 0
        """One more than the highest position of the step that was planned last."""

    def _layer(self, pool: PagedKv, number: int) -> _Layer:
        paged, kv = layer_kv(pool, number), pool.layout.layers[number]
        attention = BatonAttention(
            kv=paged,
            scale=self._rules[number].scale_of(kv.head_dim),
            num_heads=self._num_heads,
            window=kv.window or 0,
        )
        return _Layer(BatonStore(kv=paged), attention)

    def plan(self, shares: Sequence[SequenceShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """See `AttentionBackend.plan`. Nothing is staged: the kernels read the host's memory."""
        self._layer_stored = layer_stored
        contexts = [share.context_len for share in shares]
        self.num_positions = max(contexts)
        num_blocks = -(-np.array(contexts, dtype=np.int64) // self._block_size)
        self._num_sequences, self._num_tokens = len(shares), sum(share.num_tokens for share in shares)
        self._make_room(int(num_blocks.sum()))
        self._arrays.fill(shares, num_blocks, self._block_size)

    def for_graph(self, num_sequences: int) -> None:
        """See `AttentionBackend.for_graph`: the host records nothing."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.run`."""
        store, attention = self._layers[layer].store, self._layers[layer].attention
        store.k, store.v = k.data_ptr(), v.data_ptr()
        store.k_stride, store.v_stride = k.stride(0), v.stride(0)
        store.num_tokens = self._num_tokens
        self._kernels.store(store)
        if self._layer_stored is not None:
            self._layer_stored()
        out = self._kernels.empty(q.shape, q.dtype)
        attention.out, attention.q, attention.q_stride = out.data_ptr(), q.data_ptr(), q.stride(0)
        attention.num_sequences = self._num_sequences
        self._kernels.attention(attention)
        return out

    def replay(self, recording: Recording, token_ids: Tensor, positions: Tensor) -> None:
        """Make the calls of `recording` for the step that was planned last; token_ids, positions: [T] int64."""
        self._step.num_sequences = self._num_sequences
        self._step.token_ids, self._step.positions = token_ids.data_ptr(), positions.data_ptr()
        recording.replay(self._step, self._num_tokens, self._layer_stored)

    def _make_room(self, num_blocks: int) -> None:
        """For the arrays and the scratch of a step: twice what is needed, because the next step is often larger."""
        num_bytes = 64 + self._kernels.attention_scratch(self._num_sequences, self._largest_head)
        if num_bytes <= len(self._scratch) and self._arrays.hold(self._num_tokens, self._num_sequences, num_blocks):
            return
        self._scratch = torch.empty(max(2 * num_bytes, len(self._scratch)), dtype=torch.uint8)
        held = self._arrays
        self._arrays = _StepArrays(
            max(2 * self._num_tokens, len(held.slots)),
            max(2 * self._num_sequences, len(held.start)),
            max(2 * num_blocks, len(held.tables)),
        )
        for layer in self._layers:
            layer.store.slots = self._arrays.slots.ctypes.data
            self._set_addresses(layer.attention)
        self._step.slots = self._arrays.slots.ctypes.data
        self._set_addresses(self._step)

    def _set_addresses(self, step: BatonAttention | BatonStep) -> None:
        arrays = self._arrays
        step.first_token = arrays.first_token.ctypes.data
        step.start = arrays.start.ctypes.data
        step.num_tokens = arrays.num_tokens.ctypes.data
        step.table_begin = arrays.table_begin.ctypes.data
        step.block_tables = arrays.tables.ctypes.data
        step.scratch = self._scratch.data_ptr() + -self._scratch.data_ptr() % 64
