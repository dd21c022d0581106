"""Paged attention by Baton's own CPU kernels: they read the blocks where they lie, nothing is gathered.

Owns a step's index arrays and the scratch of the kernels; the states of a pool are kept by `BlockStates`. Knows no
requests and no scheduling. Host memory only.

Letters: T tokens of the step, N sequences, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Staging
from baton.engine.attention.base import PLAIN, LayerRule, LayerStored, PlannedShare
from baton.engine.attention.block_states import AttendsOverStates
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.cache.block_pool import BlockTable, pack_blocks
from baton.engine.native.arguments import (
    DTYPES,
    PLAN_TOO_LARGE,
    PLANNED,
    BatonAttention,
    BatonPagedKv,
    BatonPlan,
    BatonStep,
    BatonStore,
)
from baton.engine.native.library import Kernels
from baton.engine.native.recording import Recording
from baton.wire.layout import STATE


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

    def plan(self, block_size: int) -> BatonPlan:
        """The arguments of a call that fills them."""
        return BatonPlan(
            block_size=block_size,
            max_tokens=len(self.slots),
            max_sequences=len(self.start),
            max_blocks=len(self.tables),
            slots=self.slots.ctypes.data,
            first_token=self.first_token.ctypes.data,
            start=self.start.ctypes.data,
            counts=self.num_tokens.ctypes.data,
            table_begin=self.table_begin.ctypes.data,
            block_tables=self.tables.ctypes.data,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """The arguments of one layer's calls, of which a step changes those that belong to its tokens."""

    store: BatonStore
    attention: BatonAttention


def layer_kv(pool: PagedKv, number: int, dtype: torch.dtype) -> BatonPagedKv:
    """The keys and values of a layer as the kernels take them; valid as long as somebody holds the pool's blocks.
    `dtype`: of queries."""
    view, kv = pool.heads(number), pool.layout.layers[number]
    return BatonPagedKv(
        view[:, 0].data_ptr(),
        view[:, -1].data_ptr(),  # of latents the key is the value
        view.stride(0),
        kv.num_kv_heads,
        pool.layout.block_size,
        kv.head_dim,
        DTYPES[dtype],
        pool.layout.has_scales,
    )


class NativeAttention(AttendsOverStates):
    """Attention over one KV pool. One instance serves one runner, whose decoder computes with the same `Kernels`."""

    def __init__(
        self,
        kernels: Kernels,
        pool: PagedKv,
        num_heads: int,
        rules: Sequence[LayerRule] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`rules`: of each layer; none: the default for all. `dtype`: of queries and sinks; None: the pool's."""
        super().__init__(pool)
        self._rules = rules or [PLAIN] * pool.layout.num_layers
        self._kernels = kernels
        self._blocks = pool.blocks  # the addresses below stay valid as long as somebody holds it
        self._block_size = pool.layout.block_size
        self._num_heads = num_heads
        dtype = dtype or pool.blocks.dtype
        attended = {layer: kv for layer, kv in enumerate(pool.layout.layers) if kv.kind != STATE}
        self._layers = {layer: self._layer(pool, layer, dtype) for layer in attended}
        self._largest_head = max((kv.head_dim for kv in attended.values()), default=0)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arrays = _StepArrays(0, 0, 0)
        self._plan = self._arrays.plan(self._block_size)
        self._step = BatonStep()
        self._sequences = array("q")
        self._tables: list[BlockTable] = []  # their addresses and `_lengths` are in `_sequences`
        self._lengths: list[int] = []
        self._num_sequences = 0
        self._num_tokens = 0
        self.num_positions = 0
        """One more than the highest position of the step that was planned last."""

    def _layer(self, pool: PagedKv, number: int, dtype: torch.dtype) -> _Layer:
        paged, kv = layer_kv(pool, number, dtype), pool.layout.layers[number]
        rule = self._rules[number]
        attention = BatonAttention(
            kv=paged,
            scale=rule.scale_of(kv.head_dim),
            num_heads=self._num_heads,
            window=kv.window or 0,
            sinks=None if rule.sinks is None else rule.sinks.data_ptr(),
            cap=rule.cap or 0.0,
        )
        return _Layer(BatonStore(kv=paged), attention)

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Make the index arrays of the step. Only what states need is staged: the kernels read the host's memory."""
        self._layer_stored = layer_stored
        self._states.plan(shares, staging)
        values: list[int] = []
        self._tables = tables = []
        for share in shares:
            tables.append(table := _as_packed(share.block_table))
            values += (share.start, share.num_tokens, *table.buffer_info())
        self._sequences, self._lengths = array("q", values), values[3::4]
        self._plan_sequences()

    def plan_next(self) -> bool:
        """Plan a step over the sequences of the step that was planned last, each of which has gone on by one token. The
        block tables may have grown since, and must not have changed otherwise. Whether `starts` are where they were."""
        self._layer_stored = None
        sequences, arrays = self._sequences, self._arrays
        for place in range(0, len(sequences), 4):
            sequences[place] += 1
        lengths = list(map(len, self._tables))
        if lengths != self._lengths:
            self._note_tables(lengths)
        self._plan_sequences()
        return arrays is self._arrays

    @property
    def starts(self) -> Tensor:
        """Where each sequence of the step that was planned last begins, int64, and more behind them."""
        return torch.from_numpy(self._arrays.start)

    def _note_tables(self, lengths: list[int]) -> None:
        """Where the tables lie, which have grown."""
        for place, table in enumerate(self._tables):
            self._sequences[4 * place + 2], self._sequences[4 * place + 3] = table.buffer_info()
        self._lengths = lengths

    def _plan_sequences(self) -> None:
        plan = self._plan
        plan.sequences, plan.num_sequences = self._sequences.buffer_info()[0], len(self._tables)
        planned = self._kernels.plan(plan)
        if planned == PLAN_TOO_LARGE:
            plan = self._make_room(plan)
            planned = self._kernels.plan(plan)
        if planned != PLANNED:
            raise ValueError("a sequence has fewer blocks than its tokens need")
        self._num_sequences, self._num_tokens = plan.num_sequences, plan.num_tokens
        self.num_positions = plan.num_positions

    def for_graph(self, num_sequences: int) -> None:
        """None: the host records nothing."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend: two kernel calls with the addresses of this layer."""
        store, attention = self._layers[layer].store, self._layers[layer].attention
        store.k, store.v = k.data_ptr(), v.data_ptr()
        store.k_stride, store.v_stride = k.stride(0), v.stride(0)
        store.num_tokens = self._num_tokens
        self._kernels.store(store)
        self.stored()
        out = self._kernels.empty(q.shape, q.dtype)
        attention.out, attention.q, attention.q_stride = out.data_ptr(), q.data_ptr(), q.stride(0)
        attention.num_sequences = self._num_sequences
        self._kernels.attention(attention)
        return out

    def take_due(self, rows: Tensor) -> None:
        """Let what a recording gathers of the rows that are due take `rows` [T] int64, which have to stay."""
        self._step.due = rows.data_ptr()

    def replay(self, recording: Recording, token_ids: Tensor, positions: Tensor) -> None:
        """Make the calls of `recording` for the step that was planned last; token_ids, positions: [T] int64."""
        self._step.num_sequences = self._num_sequences
        self._step.token_ids, self._step.positions = token_ids.data_ptr(), positions.data_ptr()
        self.repeat(recording)

    def repeat(self, recording: Recording) -> None:
        """Replay again, with inputs where those of the last `replay` were."""
        recording.replay(self._step, self._num_tokens, self._layer_stored)

    def _make_room(self, needed: BatonPlan) -> BatonPlan:
        """For the arrays and the scratch of a step: twice what is needed, because the next step is often larger.
        Returns its new plan."""
        held = self._arrays
        arrays = _StepArrays(
            max(2 * needed.num_tokens, len(held.slots)),
            max(2 * needed.num_sequences, len(held.start)),
            max(2 * needed.num_blocks, len(held.tables)),
        )
        num_bytes = 64 + self._kernels.attention_scratch(len(arrays.start), self._largest_head)
        scratch = torch.empty(num_bytes, dtype=torch.uint8)
        # only now: where there was no memory for all of it, the plan and the layers go on with what they have
        self._arrays, self._scratch = arrays, scratch
        for layer in self._layers.values():
            layer.store.slots = self._arrays.slots.ctypes.data
            self._set_addresses(layer.attention)
        self._step.slots = self._arrays.slots.ctypes.data
        self._set_addresses(self._step)
        self._plan = self._arrays.plan(self._block_size)
        self._plan.sequences, self._plan.num_sequences = needed.sequences, needed.num_sequences
        return self._plan

    def _set_addresses(self, step: BatonAttention | BatonStep) -> None:
        arrays = self._arrays
        step.first_token = arrays.first_token.ctypes.data
        step.start = arrays.start.ctypes.data
        step.num_tokens = arrays.num_tokens.ctypes.data
        step.table_begin = arrays.table_begin.ctypes.data
        step.block_tables = arrays.tables.ctypes.data
        step.scratch = self._scratch.data_ptr() + -self._scratch.data_ptr() % 64


def _as_packed(block_table: Sequence[int]) -> BlockTable:
    """As the pool packs it: 32 bits a block."""
    is_packed = type(block_table) is array and block_table.typecode == "i"
    return cast("BlockTable", block_table) if is_packed else pack_blocks(block_table)
