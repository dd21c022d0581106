"""Paged attention in plain torch: the reference that every other backend is compared with.

Owns the index arithmetic between block tables and the KV tensor, and workspaces for gathered keys and values and for
scores. Knows no requests and no scheduling. Works on any device and dtype.

The KV tensor is block-major, so one (block, layer, K or V, head) is a contiguous row of `block_size` x D elements. A
gather by row numbers in the order (sequence, head, block) therefore yields keys laid out [sequence, head, token, D]
with one copy. Sequences that compute a single token are attended together, padded to the longest; prompts one by one.

Nothing here waits for a device: what it needs to know is staged as block numbers and lengths, and the first `run` of a
step makes rows and masks of them where the KV is.

Letters: T tokens of the step, N sequences with a single token, S context length (padded to whole blocks), B blocks of
the pool, L layers, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from device.base import Staging
from engine.attention.base import LayerStored, SequenceShare

_QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class _DecodeInputs:
    """What was staged for N sequences with one token each, [N] but tables [N * blocks]."""

    token_index: Tensor
    contexts: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class _PromptInputs:
    """What is known of one sequence with several tokens; table: [blocks], staged."""

    first_token: int
    start: int
    num_tokens: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """A step as it was staged: nothing here may be read before the upload. begun: see `_begun_blocks`; slots: [T]."""

    begun: Tensor | None
    slots: Tensor
    decodes: _DecodeInputs | None
    prompts: Sequence[_PromptInputs]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """N sequences with one token each. rows: [N * Hkv * blocks]; hidden: window -> [N, 1, 1, S], True where a token
    does not see a key."""

    token_index: Tensor
    rows: Tensor
    num_sequences: int
    context_len: int
    hidden: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class _PromptPlan:
    """One sequence with several tokens. hidden: window -> [tokens, S], True where a token does not see a key."""

    first_token: int
    start: int
    num_tokens: int
    rows: Tensor
    hidden: dict[int | None, Tensor]


class TorchAttention:
    """Attention over one KV tensor [B, L, 2, Hkv, block_size, D]. One instance serves one runner."""

    def __init__(self, kv: Tensor, windows: Sequence[int | None]) -> None:
        self._kv = kv
        num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        self._num_layers, self._num_kv_heads = num_layers, num_kv_heads
        self._block_size, self._head_dim = block_size, head_dim
        self._windows = tuple(windows)
        self._head_rows = kv.view(num_blocks * num_layers * 2 * num_kv_heads, block_size * head_dim)
        self._token_rows = kv.view(num_blocks * num_layers * 2 * num_kv_heads * block_size, head_dim)
        self._heads = torch.arange(num_kv_heads, device=kv.device)
        self._workspace = kv.new_empty(2, 0)
        self._score_workspace = kv.new_empty(2, 0)
        self._inputs: _StepInputs | None = None
        self._store_rows = self._heads[:0]
        self._decodes: _DecodePlan | None = None
        self._prompts: list[_PromptPlan] = []
        self._layer_stored: LayerStored | None = None

    def plan(self, shares: Sequence[SequenceShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """See `AttentionBackend.plan`."""
        self._layer_stored = layer_stored
        begun = self._begun_blocks(shares)
        decodes: list[tuple[int, SequenceShare]] = []
        prompts: list[_PromptInputs] = []
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
            begun=staging.put(begun) if len(begun) else None,
            slots=slots,
            decodes=self._put_decodes(decodes, staging) if decodes else None,
            prompts=prompts,
        )

    def for_graph(self, num_sequences: int) -> None:
        """See `AttentionBackend.for_graph`: the shapes here follow the longest context of a step."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.run`."""
        if self._inputs is not None:
            self._begin_step(self._inputs)
            self._inputs = None
        self._store(layer, k, v)
        if self._layer_stored is not None:
            self._layer_stored()
        window = self._windows[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decodes is not None:
            self._attend_decodes(self._decodes, layer, window, q, out)
        for prompt in self._prompts:
            self._attend_prompt(prompt, layer, window, q, out)
        return out

    def _begin_step(self, inputs: _StepInputs) -> None:
        """What of a step is the same for all layers; issued by its first `run`, when what was staged is there."""
        if inputs.begun is not None:
            self._kv.index_fill_(0, inputs.begun, 0)
        self._store_rows = (inputs.slots[:, None] + self._heads * self._block_size).view(-1)
        self._decodes = self._plan_decodes(inputs.decodes) if inputs.decodes is not None else None
        self._prompts = [self._plan_prompt(prompt) for prompt in inputs.prompts]

    def _begun_blocks(self, shares: Sequence[SequenceShare]) -> np.ndarray:
        """The blocks that this step begins and does not fill; they are zeroed. What lies behind the last token gets the
        weight zero, but zero times NaN is NaN: whatever a block held before must not reach the request that has it
        now."""
        begun = [
            share.block_table[share.context_len // self._block_size]
            for share in shares
            if share.context_len % self._block_size > 0
            and share.start <= share.context_len - share.context_len % self._block_size
        ]
        return np.array(begun, dtype=np.int64)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        rows = self._store_rows + layer * 2 * self._num_kv_heads * self._block_size
        self._token_rows.index_copy_(0, rows, k.reshape(-1, self._head_dim))
        rows += self._num_kv_heads * self._block_size
        self._token_rows.index_copy_(0, rows, v.reshape(-1, self._head_dim))

    def _gather(self, rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `rows` in `layer`, each [len(rows), block_size * D], in the workspace."""
        num_elements = rows.numel() * self._block_size * self._head_dim
        if self._workspace.shape[1] < num_elements:
            self._workspace = self._kv.new_empty(2, num_elements)
        keys = self._workspace[0, :num_elements].view(rows.numel(), -1)
        values = self._workspace[1, :num_elements].view(rows.numel(), -1)
        layer_rows = rows + layer * 2 * self._num_kv_heads
        torch.index_select(self._head_rows, 0, layer_rows, out=keys)
        layer_rows += self._num_kv_heads
        torch.index_select(self._head_rows, 0, layer_rows, out=values)
        return keys, values

    def _attend_decodes(self, plan: _DecodePlan, layer: int, window: int | None, q: Tensor, out: Tensor) -> None:
        keys, values = self._gather(plan.rows, layer)
        shape = (plan.num_sequences, self._num_kv_heads, plan.context_len, self._head_dim)
        queries = q.index_select(0, plan.token_index)
        # all query heads of one key head are rows of one product: keys are read once, nothing is repeated
        queries = queries.view(plan.num_sequences, self._num_kv_heads, -1, self._head_dim)
        scores = torch.matmul(queries, keys.view(shape).transpose(2, 3)).float() * self._scale
        scores.masked_fill_(plan.hidden[window], -math.inf)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        attended = torch.matmul(weights, values.view(shape))
        out.index_copy_(0, plan.token_index, attended.view(plan.num_sequences, -1, self._head_dim))

    def _attend_prompt(self, plan: _PromptPlan, layer: int, window: int | None, q: Tensor, out: Tensor) -> None:
        keys, values = (rows.view(self._num_kv_heads, -1, self._head_dim) for rows in self._gather(plan.rows, layer))
        # [T, Hq, D] as [Hkv, G, T, D]: the query heads of one key head stand beside it
        grouped = (plan.num_tokens, self._num_kv_heads, -1, self._head_dim)
        tokens = slice(plan.first_token, plan.first_token + plan.num_tokens)
        queries = q[tokens].view(grouped).permute(1, 2, 0, 3)
        attended = out[tokens].view(grouped).permute(1, 2, 0, 3)
        hidden = plan.hidden[window]
        for first in range(0, plan.num_tokens, _QUERY_TILE):
            # keys behind the tile's last token are invisible to all of it
            last = min(first + _QUERY_TILE, plan.num_tokens)
            visible = plan.start + last
            # without a window only the tile's own keys are hidden from some of it
            first_hidden = 0 if window is not None else plan.start + first
            tile = queries[:, :, first:last]
            weights = self._weights(tile, keys[:, :visible], hidden[first:last, first_hidden:visible], first_hidden)
            attended[:, :, first:last] = torch.bmm(weights, values[:, :visible]).view(tile.shape)

    def _weights(self, queries: Tensor, keys: Tensor, hidden: Tensor, first_hidden: int) -> Tensor:
        """Weights [Hkv, G * tokens, S], in the workspace, of queries [Hkv, G, tokens, D] over keys [Hkv, S, D].

        `hidden` [tokens, S - first_hidden] is True where a query does not see a key. Plain products and one softmax:
        torch's fused CPU kernel takes 1.5 to 2 times as long in bfloat16.
        """
        num_kv_heads, num_groups, num_tokens, _ = queries.shape
        num_keys = keys.shape[1]
        num_elements = num_kv_heads * num_groups * num_tokens * num_keys
        if self._score_workspace.shape[1] < num_elements:
            self._score_workspace = self._kv.new_empty(2, num_elements)
        shape = (num_kv_heads, num_groups * num_tokens, num_keys)
        scores = self._score_workspace[0, :num_elements].view(shape)
        flat_queries = queries.reshape(num_kv_heads, num_groups * num_tokens, -1)
        # the scale is applied to the product's float32 sums, before they are rounded
        torch.baddbmm(scores, flat_queries, keys.transpose(1, 2), beta=0, alpha=self._scale, out=scores)
        by_group = scores.view(num_kv_heads, num_groups, num_tokens, num_keys)
        by_group[..., first_hidden:].masked_fill_(hidden, -math.inf)
        weights = self._score_workspace[1, :num_elements].view(shape)
        return torch.softmax(scores, dim=-1, out=weights)

    @property
    def _scale(self) -> float:
        return 1.0 / math.sqrt(self._head_dim)

    def _put_decodes(self, decodes: Sequence[tuple[int, SequenceShare]], staging: Staging) -> _DecodeInputs:
        contexts = np.array([share.context_len for _, share in decodes], dtype=np.int64)
        num_blocks = -(-int(contexts.max()) // self._block_size)
        tables = np.empty((len(decodes), num_blocks), dtype=np.int64)
        for row, (_, share) in enumerate(decodes):
            used = -(-share.context_len // self._block_size)
            tables[row, :used] = share.block_table[:used]
            tables[row, used:] = share.block_table[0]  # padding: the weight zero, see `_begun_blocks`
        return _DecodeInputs(
            token_index=staging.put(np.array([first for first, _ in decodes], dtype=np.int64)),
            contexts=staging.put(contexts),
            tables=staging.put(tables.reshape(-1)),
        )

    def _plan_decodes(self, decodes: _DecodeInputs) -> _DecodePlan:
        num_sequences = len(decodes.contexts)
        tables = decodes.tables.view(num_sequences, -1)
        context_len = tables.shape[1] * self._block_size
        keys = torch.arange(context_len, device=self._kv.device)
        contexts = decodes.contexts[:, None, None, None]
        hidden = {}
        for window in set(self._windows):
            hidden[window] = keys >= contexts
            if window is not None:
                hidden[window] |= keys < contexts - window
        return _DecodePlan(decodes.token_index, self._rows_of_heads(tables), num_sequences, context_len, hidden)

    def _plan_prompt(self, prompt: _PromptInputs) -> _PromptPlan:
        device = self._kv.device
        keys = torch.arange(len(prompt.table) * self._block_size, device=device)
        queries = torch.arange(prompt.start, prompt.start + prompt.num_tokens, device=device)[:, None]
        hidden = {}
        for window in set(self._windows):
            hidden[window] = keys > queries
            if window is not None:
                hidden[window] |= keys <= queries - window
        rows = self._rows_of_heads(prompt.table[None, :])
        return _PromptPlan(prompt.first_token, prompt.start, prompt.num_tokens, rows, hidden)

    def _rows_of_heads(self, tables: Tensor) -> Tensor:
        """Rows of `_head_rows` for layer 0 keys, in the order (sequence, head, block), of tables [N, blocks]."""
        first = tables * (self._num_layers * 2 * self._num_kv_heads)
        return (first[:, None, :] + self._heads[:, None]).view(-1)

    def _slots_of_new_tokens(self, shares: Sequence[SequenceShare]) -> np.ndarray:
        """Rows of `_token_rows` for layer 0 keys of head 0, one for each token."""
        slots = []
        for share in shares:
            positions = np.arange(share.start, share.context_len)
            blocks = np.array(share.block_table, dtype=np.int64)[positions // self._block_size]
            block_rows = blocks * (self._num_layers * 2 * self._num_kv_heads * self._block_size)
            slots.append(block_rows + positions % self._block_size)
        return np.concatenate(slots)
