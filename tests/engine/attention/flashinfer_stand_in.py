"""What Baton calls of flashinfer, computed on the CPU: same names, same arguments, checks at least as strict.

Compared with the sources of flashinfer-python 0.6.5 and 0.7.2.post1 (`flashinfer_signatures.py` does it): every
argument here exists there under that name, at that place, with that default. Arguments that Baton does not use are
left out, so using one fails here.

What it keeps of the real one:
- A plan computes from host lengths and writes its schedule into the int workspace; a run reads the schedule, the page
  table and the last page lengths from device memory when it is computed, not when it is called. A recorded run thus
  sees later plans, and notices a plan that is missing: its schedule does not fit the page table any more.
- In graph mode the batch size is fixed and the buffers are those of construction; `fast_decode_plan` copies nothing
  into them.
- Workspaces that are too small are refused, by the sizes that a GPU of 132 multiprocessors needs in version 0.6.5.
- Caches are read through their strides, and nothing behind the last token of a sequence is.
- A device tensor where the host needs values is refused: the real one would wait for the device. That is seen where
  host and device differ, as they do under `FakeTensorMode`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from baton.engine.attention.flashinfer import FlashInferCalls

COMPARED_WITH = ("0.6.5", "0.7.2.post1")
NUM_PROCESSORS = 132
_DECODE, _PREFILL = 1, 2
_HEADER = 4
_INT_WORKSPACE_BYTES = 8 * 2**20
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
_HEAD_DIMS = (64, 128, 256)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_host(name: str, tensor: Tensor) -> None:
    _require(tensor.device.type == "cpu", f"{name} is read by the host: a device tensor would be waited for")
    _require(tensor.dtype == torch.int32 and tensor.dim() == 1, f"{name} must be int32 [n]")


def _require_index(name: str, tensor: Tensor, device: torch.device) -> None:
    _require(tensor.device == device, f"{name} must be on {device}, is on {tensor.device}")
    _require(tensor.dtype == torch.int32 and tensor.dim() == 1, f"{name} must be int32 [n]")
    _require(tensor.is_contiguous(), f"{name} must be contiguous")


def _require_cache(cache: Any, kv_layout: str) -> tuple[Tensor, Tensor]:
    _require(kv_layout == "HND", "the stand-in knows HND only")
    _require(isinstance(cache, tuple) and len(cache) == 2, "the cache must be a tuple of keys and values")
    k_cache, v_cache = cache
    _require(k_cache.dim() == 4 and k_cache.shape == v_cache.shape, "caches must be [pages, heads, page size, D]")
    _require(k_cache.stride() == v_cache.stride(), "k/v strides must be identical")
    _require(k_cache.stride(3) == 1, "caches must be contiguous at the last dimension")
    return k_cache, v_cache


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy, as of a host tensor to a GPU. A torch without CUDA cannot copy to a fake GPU."""
    if tensor.device == device and not isinstance(tensor, FakeTensor):
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _fill(buffer: Tensor, values: Tensor) -> None:
    _require(buffer.shape == values.shape and buffer.dtype == values.dtype, "the buffer does not fit")
    if not isinstance(buffer, FakeTensor):
        buffer.copy_(values)


class _Wrapper:
    """What both wrappers share: workspaces, and a plan that became a schedule in device memory."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        _require(kv_layout in ("NHD", "HND"), f"unknown layout {kv_layout}")
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._kv_layout = kv_layout
        self._is_planned = False
        self._qo_indptr_buf = self._indptr_buf = self._indices_buf = self._last_page_len_buf = torch.empty(0)
        self._window_left = -1
        self._dtypes: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.float16)
        self._shape = (0, 0, 0, 0)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        _require(int_workspace_buffer.device == float_workspace_buffer.device == self.device, "workspace moved away")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def _check_shape(self, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        _require(num_qo_heads % num_kv_heads == 0, "query heads must be a multiple of key heads")
        _require(head_dim in _HEAD_DIMS, f"Unsupported head_dim: {head_dim}")
        _require(page_size > 0, "pages must hold tokens")
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size)

    def _schedule(self, kind: int, qo_indptr: Tensor, indptr: Tensor, last_page_len: Tensor, num_ints: int) -> None:
        """Write what a run needs of this plan into the int workspace."""
        _require(4 * num_ints <= self._int_workspace_buffer.numel(), "the int workspace is too small")
        self._is_planned = True
        if isinstance(self._int_workspace_buffer, FakeTensor):
            return
        lengths = last_page_len.numpy()
        _require(bool(np.all((lengths >= 1) & (lengths <= self._shape[3]))), "last pages must hold 1 to page size")
        _require(int(indptr[0]) == int(qo_indptr[0]) == 0, "indptr must begin with 0")
        pages = np.diff(indptr.numpy())
        _require(bool(np.all(pages >= 1)), "a sequence without pages has no attention")
        contexts = (pages - 1) * self._shape[3] + lengths
        header = [kind, self._window_left, len(lengths), 0]
        record = np.concatenate([header, contexts, qo_indptr.numpy()]).astype(np.int32)
        room = self._int_workspace_buffer.view(torch.int32)
        _require(len(record) <= len(room), "the int workspace is too small")
        room[: len(record)] = torch.from_numpy(record)

    def _check_float_workspace(self, num_bytes: int) -> None:
        _require(num_bytes <= self._float_workspace_buffer.numel(), "the float workspace is too small")

    def _attend(self, kind: int, q: Tensor, paged_kv_cache: Any, out: Tensor | None, causal: bool) -> Tensor:
        _require(self._is_planned, "plan info is not initialized")
        k_cache, v_cache = _require_cache(paged_kv_cache, self._kv_layout)
        _require(q.dtype == self._dtypes[0], f"q is {q.dtype}, the plan was for {self._dtypes[0]}")
        _require(k_cache.dtype == self._dtypes[1], f"k is {k_cache.dtype}, the plan was for {self._dtypes[1]}")
        num_qo_heads, num_kv_heads, head_dim, page_size = self._shape
        _require(tuple(q.shape[1:]) == (num_qo_heads, head_dim), "q has other heads than the plan")
        _require(tuple(k_cache.shape[1:]) == (num_kv_heads, page_size, head_dim), "the cache is not the plan's")
        _require(q.stride(2) == 1, "q must be contiguous at the last dimension")
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        _require(out.shape == q.shape and out.dtype == q.dtype and out.device == q.device, "out must be like q")
        _require(out.is_contiguous(), "out must be contiguous")
        _attend(
            out,
            q,
            k_cache,
            v_cache,
            self._qo_indptr_buf,
            self._indptr_buf,
            self._indices_buf,
            self._last_page_len_buf,
            self._int_workspace_buffer,
            kind,
            causal,
            self._window_left,
        )
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        _require(backend in ("auto", "fa2"), f"the stand-in knows no backend {backend}")
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        self._fixed_batch_size = 0
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            indptr, indices, last_page_len = (buffer for buffer in buffers if buffer is not None)
            for name, buffer in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
                _require_index(f"paged_kv_{name}_buffer", buffer, self.device)
            self._fixed_batch_size = len(last_page_len)
            _require(len(indptr) == self._fixed_batch_size + 1, "indptr buffer should be batch_size + 1")
            self._indptr_buf, self._indices_buf, self._last_page_len_buf = indptr, indices, last_page_len
            self._qo_indptr_buf = torch.arange(len(indptr), dtype=torch.int32, device=self.device)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        self._check_plan(indptr, indices, last_page_len)
        self._check_shape(num_qo_heads, num_kv_heads, head_dim, page_size)
        qo_indptr = torch.arange(len(indptr), dtype=torch.int32)
        if self._use_cuda_graph:
            _fill(self._indptr_buf, indptr)
            _fill(self._last_page_len_buf, last_page_len)
            _fill(self._indices_buf[: len(indices)], indices)
        else:
            self._indptr_buf = _to_device(indptr, self.device)
            self._last_page_len_buf = _to_device(last_page_len, self.device)
            self._indices_buf = indices  # on the device already: a view
            self._qo_indptr_buf = _to_device(qo_indptr, self.device)
        self._dtypes = (_dtype(q_data_type), _dtype(kv_data_type or q_data_type))
        self._make_plan(indptr, last_page_len, window_left)

    def run(self, q: Tensor, paged_kv_cache: Any, *, out: Tensor | None = None) -> Tensor:
        _require(len(q) == len(self._last_page_len_buf), "one query for each sequence")
        return self._attend(_DECODE, q, paged_kv_cache, out, causal=False)

    def _check_plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        _require_host("indptr", indptr)
        _require_host("last_page_len", last_page_len)
        _require_index("indices", indices, self.device)
        _require(len(indptr) == len(last_page_len) + 1, "indptr should be batch_size + 1")
        if self._use_cuda_graph:
            _require(len(last_page_len) == self._fixed_batch_size, "The batch size should be fixed in cudagraph mode")
            _require(len(indices) <= len(self._indices_buf), "more indices than the buffer holds")

    def _make_plan(self, indptr: Tensor, last_page_len: Tensor, window_left: int) -> None:
        num_qo_heads, num_kv_heads, head_dim, _ = self._shape
        group, batch = num_qo_heads // num_kv_heads, len(last_page_len)
        pieces = 2 * NUM_PROCESSORS // num_kv_heads
        if self._use_tensor_cores:
            tile = 16 if group <= 16 else 64
            tiles = -(-batch * group // tile) + batch - 1
            self._check_float_workspace(4 * num_qo_heads * max(pieces, tiles) * tile * (head_dim + 1))
        else:
            _require(group in _CUDA_CORE_GROUPS, f"Unsupported group_size: {group}")
        self._window_left = window_left
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32)
        self._schedule(_DECODE, qo_indptr, indptr, last_page_len, 5 * max(batch, 32 * NUM_PROCESSORS))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        _require(backend in ("auto", "fa2", "fa3"), f"the stand-in knows no backend {backend}")
        self._causal = False

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        _require_host("qo_indptr", qo_indptr)
        _require_host("paged_kv_indptr", paged_kv_indptr)
        _require_host("paged_kv_last_page_len", paged_kv_last_page_len)
        _require_index("paged_kv_indices", paged_kv_indices, self.device)
        _require(len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1, "batch sizes differ")
        self._check_shape(num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        pieces, tile = 2 * NUM_PROCESSORS // num_kv_heads, 128 if head_dim_qk < 256 else 64
        self._check_float_workspace(4 * num_qo_heads * pieces * tile * (head_dim_qk + 1))
        self._qo_indptr_buf = _to_device(qo_indptr, self.device)
        self._indptr_buf = _to_device(paged_kv_indptr, self.device)
        self._last_page_len_buf = _to_device(paged_kv_last_page_len, self.device)
        self._indices_buf = paged_kv_indices
        self._causal, self._window_left = causal, window_left
        self._dtypes = (_dtype(q_data_type), _dtype(kv_data_type or q_data_type))
        self._num_rows = 0 if isinstance(qo_indptr, FakeTensor) else int(qo_indptr[-1])
        self._schedule(_PREFILL, qo_indptr, paged_kv_indptr, paged_kv_last_page_len, len(qo_indptr))

    def run(self, q: Tensor, paged_kv_cache: Any, *, out: Tensor | None = None) -> Tensor:
        _require(self._num_rows in (0, len(q)), f"q has {len(q)} rows, the plan {self._num_rows}")
        return self._attend(_PREFILL, q, paged_kv_cache, out, self._causal)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    window_left: int = -1,
    q_data_type: torch.dtype | str | None = None,
    kv_data_type: torch.dtype | str | None = None,
) -> None:
    _require(self._is_planned, "the first plan of a wrapper must be a plain one")
    _require(self._use_cuda_graph, "the stand-in knows fast plans in graph mode only")
    self._check_plan(indptr, indices, last_page_len)
    _require(self._shape == (num_qo_heads, num_kv_heads, head_dim, page_size), "the shape changed")
    _require(self._window_left == window_left, "the window changed")
    _require(self._dtypes == (_dtype(q_data_type), _dtype(kv_data_type)), "the types changed")
    self._make_plan(indptr, last_page_len, window_left)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Any,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    k_cache, v_cache = _require_cache(paged_kv_cache, kv_layout)
    device = append_key.device
    for name, tensor in (("key", append_key), ("value", append_value)):
        _require(tensor.dtype == k_cache.dtype, f"the {name} is not of the cache's type")
        _require(tensor.dim() == 3 and tensor.stride(2) == 1, f"the {name} must be [n, heads, D], contiguous at last")
        _require(tuple(tensor.shape[1:]) == (k_cache.shape[1], k_cache.shape[3]), f"the {name} has other heads")
        _require(tensor.device == k_cache.device == device, f"the {name} is on another device")
    _require_index("batch_indices", batch_indices, device)
    _require_index("positions", positions, device)
    _require_index("kv_indices", kv_indices, device)
    _require_index("kv_indptr", kv_indptr, device)
    _require_index("kv_last_page_len", kv_last_page_len, device)
    _require(len(batch_indices) == len(positions) == len(append_key) == len(append_value), "one slot for each token")
    _require(len(kv_indptr) == len(kv_last_page_len) + 1, "indptr should be batch_size + 1")
    _append(append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr)


CALLS = FlashInferCalls(
    BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, fast_decode_plan, append_paged_kv_cache
)


def _dtype(name: torch.dtype | str | None) -> torch.dtype:
    found = getattr(torch, name) if isinstance(name, str) else name
    assert isinstance(found, torch.dtype)
    return found


@torch.library.custom_op("flashinfer_stand_in::append", mutates_args=("k_cache", "v_cache"))
def _append(
    key: Tensor,
    value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    indptr: Tensor,
) -> None:
    page_size = k_cache.shape[2]
    entries = indptr[batch_indices.long()].long() * page_size + positions.long()
    pages, slots = indices[entries // page_size].long(), entries % page_size
    k_cache[pages, :, slots] = key
    v_cache[pages, :, slots] = value


@_append.register_fake
def _(*tensors: Tensor) -> None:
    _require(len({tensor.device for tensor in tensors}) == 1, "tensors are on different devices")


@torch.library.custom_op("flashinfer_stand_in::attend", mutates_args=("out",))
def _attend(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    schedule: Tensor,
    kind: int,
    causal: bool,
    window_left: int,
) -> None:
    page_size, batch = k_cache.shape[2], len(last_page_len)
    starts, rows = indptr.tolist(), qo_indptr.tolist()
    contexts = [
        (last - first - 1) * page_size + used
        for first, last, used in zip(starts[:-1], starts[1:], last_page_len.tolist(), strict=True)
    ]
    planned = schedule.view(torch.int32)[: _HEADER + 2 * batch + 1].tolist()
    _require(planned == [kind, window_left, batch, 0, *contexts, *rows], "what was planned last is another step")
    for sequence, context in enumerate(contexts):
        pages = indices[starts[sequence] : starts[sequence + 1]].long()
        keys, values = (
            cache[pages].transpose(1, 2).reshape(-1, *cache.shape[1::2])[:context].double()
            for cache in (k_cache, v_cache)
        )
        mine = slice(rows[sequence], rows[sequence + 1])
        out[mine] = _attend_one(q[mine].double(), keys, values, causal, window_left).to(out.dtype)


@_attend.register_fake
def _(*arguments: Any) -> None:
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    _require(len({tensor.device for tensor in tensors}) == 1, "tensors are on different devices")


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, causal: bool, window_left: int) -> Tensor:
    """[T, Hq, D] of q over keys and values [S, Hkv, D]; the last query is the last key."""
    group = q.shape[1] // keys.shape[1]
    at = torch.arange(len(keys) - len(q), len(keys))[:, None]
    key_at = torch.arange(len(keys))
    hidden = key_at > at if causal else torch.zeros(len(q), len(keys), dtype=torch.bool)
    if window_left >= 0:
        hidden = hidden | (key_at < at - window_left)
    scores = torch.einsum("thd,shd->hts", q, keys.repeat_interleave(group, dim=1)) / q.shape[2] ** 0.5
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, dim=1))
