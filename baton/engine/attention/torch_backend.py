"""Paged attention in plain torch: the reference that every other backend is compared with.

Owns the index arithmetic between block tables and the KV tensor, and workspaces for gathered keys and values and for
scores. Knows no requests and no scheduling. Works on any device and dtype.

The pool is block-major, so one (block, layer, K or V, head) is a contiguous row (`kv_planes.py`). Seen from
where a layer's keys (or values) begin, the rows of all blocks lie in one grid: a gather by row numbers in the order
(sequence, head, block) therefore yields keys laid out [sequence, head, token, D] with one copy, and the row numbers are
the same for all layers of a KV group. Sequences that compute a single token are attended together, padded to the
longest; prompts one by one.

Nothing here waits for a device: what it needs to know is staged as block numbers and lengths, and the first `run` of a
step makes rows and masks of them where the KV is, once for each group.

Letters: T tokens of the step, N sequences with a single token, S context length (padded to whole blocks), B blocks of
the pool, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Staging
from baton.engine.attention.base import PLAIN, LayerRule, LayerStored, PlannedShare
from baton.engine.attention.block_states import AttendsOverStates
from baton.engine.attention.kv_planes import PlainPlane, Plane, ScaledPlane
from baton.engine.attention.paged_kv import PagedKv
from baton.wire.errors import InvalidSetting
from baton.wire.layout import STATE, LayerKv

_QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class _DecodeInputs:
    """The staged inputs of N sequences with one token each, all [N] except tables [N * blocks]."""

    token_index: Tensor
    contexts: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class _PromptInputs:
    """The inputs of one sequence with several tokens; table: [blocks], staged."""

    first_token: int
    start: int
    num_tokens: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """A step as it was staged: nothing here may be read before the upload. begun: see `begun_blocks`; slots: [T], the
    slots of the step's tokens, counted through the pool."""

    begun: Tensor | None
    slots: Tensor
    decodes: _DecodeInputs | None
    prompts: Sequence[_PromptInputs]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """N sequences with one token each. rows: [N * Hkv * blocks]; hidden: [N, 1, 1, S], True where a token does not see
    a key."""

    token_index: Tensor
    rows: Tensor
    num_sequences: int
    context_len: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    """One sequence with several tokens. hidden: [tokens, S], True where a token does not see a key."""

    first_token: int
    start: int
    num_tokens: int
    rows: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """A step for the layers of one group. store_rows: [T * Hkv], where keys and values of the step's tokens go."""

    store_rows: Tensor
    decodes: _DecodePlan | None
    prompts: Sequence[_PromptPlan]


def begun_blocks(shares: Sequence[PlannedShare], block_size: int) -> list[int]:
    """The ids of blocks that a step begins and does not fill; they are zeroed before the step.

    Attention gives elements behind the last token the weight zero, but zero times NaN is NaN. So a block's old content
    must not reach the request that has the block now.
    """
    return [
        share.block_table[share.context_len // block_size]
        for share in shares
        if share.context_len % block_size > 0 and share.start <= share.context_len - share.context_len % block_size
    ]


class _Rows:
    """Computes row numbers within one layer of a group, and which keys lie outside of the group's window."""

    def __init__(self, pool: PagedKv, kv: LayerKv) -> None:
        block_size, block_elements = pool.layout.block_size, pool.blocks.shape[1]
        head_elements = pool.layout.head_elements(kv)
        if block_elements % head_elements:
            raise InvalidSetting(
                f"the torch attention backend cannot compute layers with KV heads of {kv.head_dim} elements beside the "
                f"other layers of this model; blocks of {block_elements} elements are no multiple of a head's row"
            )
        self.kv = kv
        self._block_size = block_size
        self._device = pool.blocks.device
        self._heads = torch.arange(kv.num_kv_heads, device=self._device)
        self._head_rows_per_block = block_elements // head_elements
        self._has_scales = pool.layout.has_scales

    def plane(self, heads: Tensor) -> Plane:
        """Keys or values [B, Hkv, elements of a head] of a layer as rows of one head and block."""
        num_blocks, num_heads, row = heads.shape
        num_rows = (num_blocks - 1) * self._head_rows_per_block + num_heads
        rows = heads.as_strided((num_rows, row), (row, 1), heads.storage_offset())
        if self._has_scales:
            return ScaledPlane(rows, self._block_size, self.kv.head_dim)
        return PlainPlane(rows, self.kv.head_dim)

    def plan(self, inputs: _StepInputs) -> _GroupPlan:
        """The plan of a step for all layers of the group."""
        # slots follow each other within a block; from one block to the next there are the rows of all layers between
        gap = (self._head_rows_per_block - 1) * self._block_size
        first = inputs.slots + inputs.slots // self._block_size * gap
        return _GroupPlan(
            store_rows=(first[:, None] + self._heads * self._block_size).view(-1),
            decodes=self._plan_decodes(inputs.decodes) if inputs.decodes is not None else None,
            prompts=[self._plan_prompt(prompt) for prompt in inputs.prompts],
        )

    def _plan_decodes(self, decodes: _DecodeInputs) -> _DecodePlan:
        num_sequences = len(decodes.contexts)
        tables = decodes.tables.view(num_sequences, -1)
        context_len = tables.shape[1] * self._block_size
        keys = torch.arange(context_len, device=self._device)
        contexts = decodes.contexts[:, None, None, None]
        hidden = keys >= contexts
        if self.kv.window is not None:
            hidden |= keys < contexts - self.kv.window
        return _DecodePlan(decodes.token_index, self._in_tables(tables), num_sequences, context_len, hidden)

    def _plan_prompt(self, prompt: _PromptInputs) -> _PromptPlan:
        keys = torch.arange(len(prompt.table) * self._block_size, device=self._device)
        queries = torch.arange(prompt.start, prompt.start + prompt.num_tokens, device=self._device)[:, None]
        hidden = keys > queries
        if self.kv.window is not None:
            hidden |= keys <= queries - self.kv.window
        rows = self._in_tables(prompt.table[None, :])
        return _PromptPlan(prompt.first_token, prompt.start, prompt.num_tokens, rows, hidden)

    def _in_tables(self, tables: Tensor) -> Tensor:
        """Rows of heads, in the order (sequence, head, block), of tables [N, blocks]."""
        first = tables * self._head_rows_per_block
        return (first[:, None, :] + self._heads[:, None]).view(-1)


class _Layer:
    """One layer's keys and values as rows, and the group it is planned with."""

    def __init__(self, group: int, rows: _Rows, heads: Tensor, rule: LayerRule) -> None:
        """heads: [B, planes, Hkv, elements of a head]."""
        self.scale, self.cap = rule.scale_of(rows.kv.head_dim), rule.cap
        self.sinks = None if rule.sinks is None else rule.sinks.view(rows.kv.num_kv_heads, -1)
        self.group = group
        self.kv = rows.kv
        # of latents the key is the value
        self.keys, self.values = rows.plane(heads[:, 0]), rows.plane(heads[:, -1])


class TorchAttention(AttendsOverStates):
    """Attention over one KV pool. One instance serves one runner. Raises `InvalidSetting` for a pool whose layers
    differ so much that their rows lie in no grid."""

    def __init__(self, pool: PagedKv, rules: Sequence[LayerRule] = ()) -> None:
        """`rules`: of each layer; none: the default for all."""
        super().__init__(pool)
        rules = rules or [PLAIN] * pool.layout.num_layers
        self._blocks = pool.blocks
        self._block_size = pool.layout.block_size
        self._own_part = pool.own_part
        self._is_shared = not pool.shard.is_whole
        groups = [group for group in pool.layout.groups if group.kv.kind != STATE]
        self._groups = [_Rows(pool, group.kv) for group in groups]
        self._layers = {
            layer: _Layer(number, rows, pool.heads(layer), rules[layer])
            for number, (rows, group) in enumerate(zip(self._groups, groups, strict=True))
            for layer in group.layers
        }
        self._workspace = self._blocks.new_empty(2, 0)
        self._score_workspace = self._blocks.new_empty(2, 0)
        self._inputs: _StepInputs | None = None
        self._plans: list[_GroupPlan] = []

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Stage slots, block tables and masks for gathers; decodes are computed together, prompts one after another."""
        self._layer_stored = layer_stored
        # in memory that ranks share, this rank could wipe what another has stored: the runner does it before the step
        begun = () if self._is_shared else begun_blocks(shares, self._block_size)
        decodes: list[tuple[int, PlannedShare]] = []
        prompts: list[_PromptInputs] = []
        self._states.plan(shares, staging)
        slots = staging.put(self._slots_of_new_tokens(shares))
        first_token = 0
        for share in shares:
            if share.num_tokens == 1:
                decodes.append((first_token, share))
            else:
                used = share.block_table[: -(-share.context_len // self._block_size)]
                table = staging.put(np.array(used, dtype=np.int64))
                prompts.append(_PromptInputs(first_token, share.start, share.num_tokens, table))
            first_token += share.num_tokens
        self._inputs = _StepInputs(
            begun=staging.put(np.array(begun, dtype=np.int64)) if begun else None,
            slots=slots,
            decodes=self._put_decodes(decodes, staging) if decodes else None,
            prompts=prompts,
        )

    def for_graph(self, num_sequences: int) -> None:
        """None: the shapes of a step depend on its longest context, so it cannot be recorded."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend in plain torch: decodes in one batch, then prompt by prompt."""
        self._begin_step()
        here = self._layers[layer]
        plan = self._plans[here.group]
        here.keys.store(plan.store_rows, k)
        here.values.store(plan.store_rows, v)
        self.stored()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.decodes is not None:
            self._attend_decodes(plan.decodes, here, q, out)
        for prompt in plan.prompts:
            self._attend_prompt(prompt, here, q, out)
        return out

    def recent(self, layer: int, x: Tensor, num_before: int) -> Tensor:
        """Windows of inputs, [T, 1 + num_before, E]. The first call of a step also wipes the blocks that it begins."""
        self._begin_step()
        return super().recent(layer, x, num_before)

    def _begin_step(self) -> None:
        """Prepare what several layers share in a step; issued by its first layer, when the staged inputs are on the
        device."""
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        if inputs.begun is not None:
            self._own_part.index_fill_(0, inputs.begun, 0)
        self._plans = [group.plan(inputs) for group in self._groups]

    def _gather(self, rows: Tensor, layer: _Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` in `layer`, each [len(rows), block_size * D] of `dtype`, in the workspace."""
        num_elements = rows.numel() * self._block_size * layer.kv.head_dim
        if self._workspace.shape[1] < num_elements:
            self._workspace = self._blocks.new_empty(2, num_elements, dtype=dtype)
        keys = self._workspace[0, :num_elements].view(rows.numel(), -1)
        values = self._workspace[1, :num_elements].view(rows.numel(), -1)
        layer.keys.gather(rows, keys)
        layer.values.gather(rows, values)
        return keys, values

    def _attend_decodes(self, plan: _DecodePlan, layer: _Layer, q: Tensor, out: Tensor) -> None:
        keys, values = self._gather(plan.rows, layer, q.dtype)
        num_kv_heads, head_dim = layer.kv.num_kv_heads, layer.kv.head_dim
        shape = (plan.num_sequences, num_kv_heads, plan.context_len, head_dim)
        queries = q.index_select(0, plan.token_index)
        # all query heads of one key head are rows of one product: keys are read once, nothing is repeated
        queries = queries.view(plan.num_sequences, num_kv_heads, -1, head_dim)
        scores = torch.matmul(queries, keys.view(shape).transpose(2, 3)).float() * layer.scale
        if layer.cap is not None:
            _cap(scores, layer.cap)
        scores.masked_fill_(plan.hidden, -math.inf)
        if layer.sinks is None:
            weights = torch.softmax(scores, dim=-1).to(q.dtype)
        else:
            weights = _softmax_with_sinks(scores, layer.sinks[None, :, :, None]).to(q.dtype)
        attended = torch.matmul(weights, values.view(shape))
        out.index_copy_(0, plan.token_index, attended.view(plan.num_sequences, -1, head_dim))

    def _attend_prompt(self, plan: _PromptPlan, layer: _Layer, q: Tensor, out: Tensor) -> None:
        num_kv_heads, head_dim = layer.kv.num_kv_heads, layer.kv.head_dim
        keys, values = (rows.view(num_kv_heads, -1, head_dim) for rows in self._gather(plan.rows, layer, q.dtype))
        # [T, Hq, D] as [Hkv, G, T, D]: the query heads of one key head stand beside it
        grouped = (plan.num_tokens, num_kv_heads, -1, head_dim)
        tokens = slice(plan.first_token, plan.first_token + plan.num_tokens)
        queries = q[tokens].view(grouped).permute(1, 2, 0, 3)
        attended = out[tokens].view(grouped).permute(1, 2, 0, 3)
        for first in range(0, plan.num_tokens, _QUERY_TILE):
            # keys behind the tile's last token are invisible to all of it
            last = min(first + _QUERY_TILE, plan.num_tokens)
            visible = plan.start + last
            # without a window only the tile's own keys are hidden from some of it
            first_hidden = 0 if layer.kv.window is not None else plan.start + first
            tile = queries[:, :, first:last]
            hidden = plan.hidden[first:last, first_hidden:visible]
            weights = self._weights(tile, keys[:, :visible], hidden, first_hidden, layer)
            attended[:, :, first:last] = torch.bmm(weights, values[:, :visible]).view(tile.shape)

    def _weights(self, queries: Tensor, keys: Tensor, hidden: Tensor, first_hidden: int, layer: _Layer) -> Tensor:
        """Weights [Hkv, G * tokens, S], in the workspace, of queries [Hkv, G, tokens, D] over keys [Hkv, S, D].

        `hidden` [tokens, S - first_hidden] is True where a query does not see a key. Plain products and one softmax:
        torch's fused CPU kernel takes 1.5 to 2 times as long in bfloat16.
        """
        num_kv_heads, num_groups, num_tokens, head_dim = queries.shape
        num_keys = keys.shape[1]
        num_elements = num_kv_heads * num_groups * num_tokens * num_keys
        if self._score_workspace.shape[1] < num_elements:
            self._score_workspace = queries.new_empty(2, num_elements)
        shape = (num_kv_heads, num_groups * num_tokens, num_keys)
        scores = self._score_workspace[0, :num_elements].view(shape)
        flat_queries = queries.reshape(num_kv_heads, num_groups * num_tokens, head_dim)
        # the scale is applied to the product's float32 sums, before they are rounded
        torch.baddbmm(scores, flat_queries, keys.transpose(1, 2), beta=0, alpha=layer.scale, out=scores)
        if layer.cap is not None:
            _cap(scores, layer.cap)
        by_group = scores.view(num_kv_heads, num_groups, num_tokens, num_keys)
        by_group[..., first_hidden:].masked_fill_(hidden, -math.inf)
        if layer.sinks is not None:
            weighed = _softmax_with_sinks(by_group, layer.sinks[:, :, None, None])
            return weighed.to(queries.dtype).view(shape)
        weights = self._score_workspace[1, :num_elements].view(shape)
        return torch.softmax(scores, dim=-1, out=weights)

    def _put_decodes(self, decodes: Sequence[tuple[int, PlannedShare]], staging: Staging) -> _DecodeInputs:
        contexts = np.array([share.context_len for _, share in decodes], dtype=np.int64)
        num_blocks = -(-int(contexts.max()) // self._block_size)
        tables = np.empty((len(decodes), num_blocks), dtype=np.int64)
        for row, (_, share) in enumerate(decodes):
            used = -(-share.context_len // self._block_size)
            tables[row, :used] = share.block_table[:used]
            tables[row, used:] = share.block_table[0]  # padding: the weight zero, see `begun_blocks`
        return _DecodeInputs(
            token_index=staging.put(np.array([first for first, _ in decodes], dtype=np.int64)),
            contexts=staging.put(contexts),
            tables=staging.put(tables.reshape(-1)),
        )

    def _slots_of_new_tokens(self, shares: Sequence[PlannedShare]) -> np.ndarray:
        """The slot (block * block_size + offset) of each new token, [T] int64."""
        slots = []
        for share in shares:
            positions = np.arange(share.start, share.context_len)
            blocks = np.array(share.block_table, dtype=np.int64)[positions // self._block_size]
            slots.append(blocks * self._block_size + positions % self._block_size)
        return np.concatenate(slots)


def _cap(scores: Tensor, cap: float) -> Tensor:
    """c * tanh(x / c) of scores x, in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """The weights of `scores`, of which a part goes to `sinks`: [..., 1], one more score of each row."""
    with_sinks = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1]
