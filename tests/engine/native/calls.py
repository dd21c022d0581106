"""The CPU kernels of attention as tests call them: through ctypes, with tensors for data."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class PagedKvArguments(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class StoreArguments(ctypes.Structure):
    _fields_ = [
        ("kv", PagedKvArguments),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
    ]


class AttentionArguments(ctypes.Structure):
    _fields_ = [
        ("kv", PagedKvArguments),
        ("out", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("first_token", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("table_begin", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("num_heads", ctypes.c_int32),
        ("window", ctypes.c_int64),
    ]


def load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.baton_levels.restype = ctypes.c_char_p
    library.baton_pool_open.restype = ctypes.c_void_p
    library.baton_pool_open.argtypes = [ctypes.c_int32, ctypes.c_char_p]
    library.baton_pool_close.argtypes = [ctypes.c_void_p]
    library.baton_attention_scratch.restype = ctypes.c_int64
    library.baton_attention_scratch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_int32,
    ]
    library.baton_attention.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.baton_store.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


@dataclass(frozen=True)
class Share:
    """Tokens start .. start + num_tokens - 1 of a sequence whose KV lies in the blocks of `table`."""

    start: int
    num_tokens: int
    table: Sequence[int]


class Threads:
    """A pool of threads of one dispatch level."""

    def __init__(self, library: ctypes.CDLL, level: str, num_threads: int) -> None:
        self._library = library
        self._pool = library.baton_pool_open(num_threads, level.encode())
        assert self._pool

    def close(self) -> None:
        self._library.baton_pool_close(self._pool)

    def store(self, planes: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """planes: [B, 2, Hkv, block_size, D], a view; slots: [T]; k and v: [T, Hkv, D], views."""
        arguments = StoreArguments(
            _paged(planes), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), slots.data_ptr(), len(slots)
        )
        self._library.baton_store(self._pool, ctypes.addressof(arguments))

    def attend(
        self, planes: Tensor, shares: Sequence[Share], q: Tensor, window: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """q: [T, Hq, D], a view; returns [T, Hq, D]. The scratch ends with bytes that must stay as they are."""
        _, num_heads, head_dim = q.shape
        counts = [share.num_tokens for share in shares]
        tables = [list(share.table[: -(-(share.start + share.num_tokens) // planes.shape[3])]) for share in shares]
        first_token = _whole([sum(counts[:i]) for i in range(len(shares))])
        start, num_tokens = _whole([share.start for share in shares]), _whole(counts)
        table_begin = _whole([sum(map(len, tables[:i])) for i in range(len(shares))])
        block_tables = _whole([block for table in tables for block in table])
        context = max(share.start + share.num_tokens for share in shares)
        num_bytes = self._library.baton_attention_scratch(self._pool, len(q), len(shares), context, num_heads, head_dim)
        memory = torch.full((num_bytes + 128,), 0xFF, dtype=torch.uint8)
        offset = -memory.data_ptr() % 64
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        arguments = AttentionArguments(
            _paged(planes),
            out.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            first_token.data_ptr(),
            start.data_ptr(),
            num_tokens.data_ptr(),
            table_begin.data_ptr(),
            block_tables.data_ptr(),
            len(shares),
            memory.data_ptr() + offset,
            1 / math.sqrt(head_dim),
            num_heads,
            window,
        )
        self._library.baton_attention(self._pool, ctypes.addressof(arguments))
        assert (memory[offset + num_bytes :] == 0xFF).all()
        return out


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _paged(planes: Tensor) -> PagedKvArguments:
    _, _, num_kv_heads, block_size, head_dim = planes.shape
    return PagedKvArguments(
        planes[:, 0].data_ptr(),
        planes[:, 1].data_ptr(),
        planes.stride(0),
        num_kv_heads,
        block_size,
        head_dim,
        _DTYPES[planes.dtype],
    )
