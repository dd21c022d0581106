"""Paged attention with flashinfer's kernels: plan once a step, run once a layer.

Owns: the arguments that flashinfer gets for a step, its wrappers, and the int workspaces of recorded decode steps. Does
not own the KV tensor nor the float workspace. The package is imported in `load_flashinfer` only; everything else here
works with the calls it is given, and imports without a GPU.

Layout. Keys and values of one layer, views [B, Hkv, block_size, D] of the pool, are what flashinfer calls a paged cache
in HND order, with a page stride of all elements of a block. All of its kernels take that stride from the tensors.
Queries, keys and values may be views of one projection: strides of tokens and heads are taken from the tensors as well.

Batches. The leading shares of one token go to the decode kernel, everything behind them to the prefill kernel, whose
causal mask is aligned at the end: the last token of a share sees the whole context. A window of W tokens, the token
itself included, is `window_left = W - 1`. There is one plan per KV group, whose layers have one shape and one window.

What lies behind the last token of a page reaches no result: keys there are masked by position, values are replaced by
zeros while they are loaded. Blocks need no clearing.

The host never waits. Plans are given lengths as host tensors, since they would copy device tensors back, and block
numbers as views of the staging. flashinfer copies those lengths from pageable memory, at most 64 KiB a copy, which CUDA
takes without waiting. A plan then fills pinned memory of its wrapper and copies that; the next plan of the same wrapper
must not start before. It does not: `Staging.begin` waits for the upload of the step before, which was issued behind
that copy on the same stream.

Whatever a graph reads is behind views that start at the same address in every step; its indices are staged last of a
plan, with room for the longest tables, so that a runner which stages its own arrays before copies only the blocks in
use.

Every kernel of a step runs on one stream, so one float workspace serves all wrappers, and one int workspace the
recorded steps of all sizes: each plan overwrites it only after the kernels of the last one.

Letters: T tokens and N sequences of a step, B blocks of the pool, L layers, Hq query heads, Hkv key and value heads, D
head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.attention.base import LayerStored, PlannedShare
from baton.engine.attention.flashinfer_limits import GRAPH_INT_WORKSPACE_BYTES, uses_tensor_cores
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.cache.block_pool import BlockTable, pack_blocks
from baton.wire.layout import LayerKv

_LAYOUT = "HND"


@dataclass(frozen=True, slots=True)
class FlashInferCalls:
    """The functions and classes of flashinfer that are used, by their own names. Tests give their own."""

    BatchDecodeWithPagedKVCacheWrapper: Any
    BatchPrefillWithPagedKVCacheWrapper: Any
    fast_decode_plan: Any
    append_paged_kv_cache: Any


def load_flashinfer() -> FlashInferCalls:
    """Import flashinfer. Raises whatever that raises: ImportError, OSError, RuntimeError, AttributeError."""
    import flashinfer

    return FlashInferCalls(
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.fast_decode_plan,
        flashinfer.append_paged_kv_cache,
    )


@dataclass(frozen=True, slots=True)
class PageTable:
    """The blocks of a batch as flashinfer counts them, int32 on the host.

    Sequence i has pages `indices[indptr[i]:indptr[i + 1]]`, the last of them holding `last_page_len[i]` tokens. Token t
    of the step belongs to sequence `batch_indices[t]` and stands at `positions[t]` in it.
    """

    indptr: Array
    indices: Array
    last_page_len: Array
    batch_indices: Array
    positions: Array

    @classmethod
    def of(cls, shares: Sequence[PlannedShare], block_size: int) -> PageTable:
        """The table of `shares`; blocks behind a context are left out."""
        counts = np.array([share.num_tokens for share in shares], dtype=np.int64)
        contexts = np.array([share.start for share in shares], dtype=np.int64) + counts
        num_pages = -(-contexts // block_size)
        used = [_packed(share.block_table)[:count] for share, count in zip(shares, num_pages.tolist(), strict=True)]
        indptr, ends = _starts(num_pages), np.cumsum(counts)
        # as bytes: looking at each block takes ten times as long
        indices = np.frombuffer(bytearray().join(used), dtype=np.int32)
        if len(indices) != indptr[-1]:
            raise ValueError("a block table does not cover the context of its share")
        # counting within a share: the step's token number less the share's first one
        firsts = np.repeat(contexts - ends, counts)
        return cls(
            indptr=indptr,
            indices=indices,
            last_page_len=(contexts - (num_pages - 1) * block_size).astype(np.int32),
            batch_indices=np.repeat(np.arange(len(shares), dtype=np.int32), counts),
            positions=(np.arange(ends[-1]) + firsts).astype(np.int32),
        )


@dataclass(frozen=True, slots=True)
class _StagedPages:
    """A `PageTable` on the device: views of the staging."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    batch_indices: Tensor
    positions: Tensor

    @classmethod
    def put(cls, pages: PageTable, staging: Staging, capacity: int = 0) -> _StagedPages:
        """Stage all of it, with room for `capacity` pages. These come last: behind the last one nothing is copied."""
        return cls(
            indptr=staging.put(pages.indptr),
            last_page_len=staging.put(pages.last_page_len),
            batch_indices=staging.put(pages.batch_indices),
            positions=staging.put(pages.positions),
            indices=staging.put(pages.indices, capacity),
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """The arguments with which flashinfer is called for the layers of one KV group."""

    kv: LayerKv
    num_heads: int
    block_size: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The positional arguments of every plan: query heads, key heads, head size, page size."""
        return self.num_heads, self.kv.num_kv_heads, self.kv.head_dim, self.block_size

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of every plan."""
        window_left = -1 if self.kv.window is None else self.kv.window - 1
        return {"window_left": window_left, "q_data_type": self.dtype, "kv_data_type": self.dtype}

    def decode_wrapper(self, calls: FlashInferCalls, workspace: Tensor, **options: Any) -> Any:
        """A wrapper for shares of one token."""
        use_tensor_cores = uses_tensor_cores(self.num_heads // self.kv.num_kv_heads)
        # "auto" resolves to "fa2" for every plan made here, but newer versions work that out again each time
        return calls.BatchDecodeWithPagedKVCacheWrapper(
            workspace, _LAYOUT, use_tensor_cores=use_tensor_cores, backend="fa2", **options
        )


class _Pool:
    """The KV pool as flashinfer sees it, and how tokens get into it.

    `layers`: keys and values of each layer; `group_of`: the place of its group in `groups`.
    """

    def __init__(self, calls: FlashInferCalls, paged: PagedKv, num_heads: int) -> None:
        layout = paged.layout
        self._append = calls.append_paged_kv_cache
        self.device, self.block_size = paged.blocks.device, layout.block_size
        self.groups = [_Group(group.kv, num_heads, layout.block_size, paged.blocks.dtype) for group in layout.groups]
        places = {layer: place for place, group in enumerate(layout.groups) for layer in group.layers}
        self.group_of = [places[layer] for layer in range(layout.num_layers)]
        views = [paged.layer(layer) for layer in range(layout.num_layers)]
        self.layers = [(view[:, 0], view[:, 1]) for view in views]

    def store(self, layer: int, k: Tensor, v: Tensor, pages: _StagedPages) -> None:
        """Issue the copy of k and v, [T, Hkv, D], to their slots. Strides of both are taken as they are."""
        self._append(
            k,
            v,
            pages.batch_indices,
            pages.positions,
            self.layers[layer],
            pages.indices,
            pages.indptr,
            pages.last_page_len,
            kv_layout=_LAYOUT,
        )


class FlashInferAttention:
    """Attention over one KV pool on a GPU. One instance serves one runner.

    `workspace`: zeros, uint8, as many as `float_workspace_bytes` of any group. `max_blocks_per_sequence`: the longest
    block table of recorded steps.
    """

    def __init__(
        self,
        calls: FlashInferCalls,
        paged: PagedKv,
        *,
        num_heads: int,
        workspace: Tensor,
        max_blocks_per_sequence: int,
    ) -> None:
        self._calls, self._workspace = calls, workspace
        self._pool = _Pool(calls, paged, num_heads)
        self._max_blocks_per_sequence = max_blocks_per_sequence
        # flashinfer knows which prefill kernels suit the GPU: "auto" takes those of Hopper on Hopper
        self._prefills = [
            calls.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend="auto") for _ in self._pool.groups
        ]
        self._decodes = [group.decode_wrapper(calls, workspace) for group in self._pool.groups]
        self._graph_int_workspaces: list[Tensor] = []
        self._pages: _StagedPages | None = None
        self._num_decodes = 0
        self._layer_stored: LayerStored | None = None

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Stage the page table, and plan flashinfer's decode and prefill kernels for these shares."""
        self._layer_stored = layer_stored
        pages = PageTable.of(shares, self._pool.block_size)
        self._pages = _StagedPages.put(pages, staging)
        self._num_decodes = _num_leading_decodes(shares)
        if self._num_decodes:
            self._plan_decodes(pages, self._pages, self._num_decodes)
        if self._num_decodes < len(shares):
            self._plan_prefills(pages, self._pages, self._num_decodes, shares)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend with the decode kernel for leading single tokens and the prefill kernel for the
        rest."""
        assert self._pages is not None, "run before plan"
        self._pool.store(layer, k, v, self._pages)
        if self._layer_stored is not None:
            self._layer_stored()
        group, cache, first = self._pool.group_of[layer], self._pool.layers[layer], self._num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if first:
            self._decodes[group].run(q[:first], cache, out=out[:first])
        if first < len(q):
            self._prefills[group].run(q[first:], cache, out=out[first:])
        return out

    def for_graph(self, num_sequences: int) -> FlashInferDecodes:
        """A backend for graphs of `num_sequences` single tokens; all graphs share the pool and the workspaces."""
        if not self._graph_int_workspaces:
            self._graph_int_workspaces = [
                torch.zeros(GRAPH_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._pool.device)
                for _ in self._pool.groups
            ]
        return FlashInferDecodes(
            self._calls,
            self._pool,
            self._workspace,
            self._graph_int_workspaces,
            num_sequences,
            num_sequences * self._max_blocks_per_sequence,
        )

    def _plan_decodes(self, pages: PageTable, staged: _StagedPages, count: int) -> None:
        indptr = torch.from_numpy(pages.indptr[: count + 1])
        last_page_len = torch.from_numpy(pages.last_page_len[:count])
        indices = staged.indices[: int(pages.indptr[count])]
        for group, wrapper in zip(self._pool.groups, self._decodes, strict=True):
            wrapper.plan(indptr, indices, last_page_len, *group.shape, **group.options)

    def _plan_prefills(
        self, pages: PageTable, staged: _StagedPages, first: int, shares: Sequence[PlannedShare]
    ) -> None:
        first_page = int(pages.indptr[first])
        queries = torch.from_numpy(_starts(np.array([share.num_tokens for share in shares[first:]])))
        indptr = torch.from_numpy(pages.indptr[first:] - first_page)
        last_page_len = torch.from_numpy(pages.last_page_len[first:])
        indices = staged.indices[first_page:]
        for group, wrapper in zip(self._pool.groups, self._prefills, strict=True):
            wrapper.plan(queries, indptr, indices, last_page_len, *group.shape, causal=True, **group.options)


class FlashInferDecodes:
    """Attention for steps of exactly N sequences with one token each, whose `run` may be recorded.

    The wrappers read indptr, last page lengths and indices where the staging has them: fixed addresses, so a step
    copies the staging and the plans, nothing else. Everything else that a plan decides (grid, offsets in the
    workspaces) follows from N and the model's shape alone in flashinfer's graph mode; how contexts are split is read
    from the int workspace.
    """

    def __init__(
        self,
        calls: FlashInferCalls,
        pool: _Pool,
        workspace: Tensor,
        int_workspaces: Sequence[Tensor],
        num_sequences: int,
        max_pages: int,
    ) -> None:
        self._calls, self._pool = calls, pool
        self._workspace, self._int_workspaces = workspace, int_workspaces
        self._num_sequences, self._max_pages = num_sequences, max_pages
        self._wrappers: list[Any] = []
        self._pages: _StagedPages | None = None
        self._layer_stored: LayerStored | None = None

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        """Stage the page table where the first plan put it. Raises `ValueError` for steps of another kind than this
        backend was made for."""
        if len(shares) != self._num_sequences or any(share.num_tokens != 1 for share in shares):
            raise ValueError(f"this backend takes {self._num_sequences} shares of one token")
        self._layer_stored = layer_stored
        pages = PageTable.of(shares, self._pool.block_size)
        staged = _StagedPages.put(pages, staging, self._max_pages)
        # a recorded step reads as many indices as its replay is planned with, not as many as there were when recorded
        whole = replace(staged, indices=staged.indices.as_strided((self._max_pages,), (1,)))
        is_first = self._pages is None
        if self._pages is None:
            groups = zip(self._pool.groups, self._int_workspaces, strict=True)
            self._wrappers = [self._wrapper(group, int_workspace, whole) for group, int_workspace in groups]
            self._pages = whole
        elif _addresses(whole) != _addresses(self._pages):
            raise ValueError("the staging moved: a recorded step reads where its first plan was")
        # in graph mode, host lengths are read while planning and not referenced afterwards
        inputs = (torch.from_numpy(pages.indptr), staged.indices, torch.from_numpy(pages.last_page_len))
        for group, wrapper in zip(self._pool.groups, self._wrappers, strict=True):
            if is_first:
                wrapper.plan(*inputs, *group.shape, **group.options)
            else:
                self._calls.fast_decode_plan(wrapper, *inputs, *group.shape, **group.options)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend with the decode kernel. A graph may record it."""
        assert self._pages is not None, "run before plan"
        self._pool.store(layer, k, v, self._pages)
        if self._layer_stored is not None:
            self._layer_stored()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrappers[self._pool.group_of[layer]].run(q, self._pool.layers[layer], out=out)
        return out

    def for_graph(self, num_sequences: int) -> FlashInferDecodes | None:
        """This backend itself if it was made for `num_sequences`, else None."""
        return self if num_sequences == self._num_sequences else None

    def _wrapper(self, group: _Group, int_workspace: Tensor, whole: _StagedPages) -> Any:
        wrapper = group.decode_wrapper(
            self._calls,
            self._workspace,
            use_cuda_graph=True,
            paged_kv_indptr_buffer=whole.indptr,
            paged_kv_indices_buffer=whole.indices,
            paged_kv_last_page_len_buffer=whole.last_page_len,
        )
        wrapper.reset_workspace_buffer(self._workspace, int_workspace)
        return wrapper


def _num_leading_decodes(shares: Sequence[PlannedShare]) -> int:
    return next((count for count, share in enumerate(shares) if share.num_tokens != 1), len(shares))


def _packed(block_table: Sequence[int]) -> BlockTable:
    """Tables of requests are packed already."""
    return block_table if isinstance(block_table, array) else pack_blocks(block_table)


def _starts(counts: Array) -> Array:
    """The first index of each run of `counts` items, and the end of the last run: int32 [len(counts) + 1]."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _addresses(staged: _StagedPages) -> tuple[int, ...]:
    tensors = (staged.indptr, staged.indices, staged.last_page_len, staged.batch_indices, staged.positions)
    return tuple(tensor.data_ptr() for tensor in tensors)
