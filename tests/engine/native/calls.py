"""The CPU kernels of attention as tests call them: with tensors for data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.attention.base import PLAIN, LayerRule
from baton.engine.native.arguments import DTYPES, BatonAttention, BatonPagedKv, BatonStore
from tests.engine.native.compiled import kernels


@dataclass(frozen=True)
class Share:
    """Tokens start .. start + num_tokens - 1 of a sequence whose KV lies in the blocks of `table`."""

    start: int
    num_tokens: int
    table: Sequence[int]


class Threads:
    """A pool of threads of one dispatch level."""

    def __init__(self, level: str, num_threads: int) -> None:
        self._kernels = kernels(level, num_threads)

    def store(self, planes: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """planes: [B, 2, Hkv, block_size, D], a view; slots: [T]; k and v: [T, Hkv, D], views."""
        arguments = BatonStore(
            _paged(planes), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), slots.data_ptr(), len(slots)
        )
        self._kernels.store(arguments)

    def attend(
        self,
        planes: Tensor,
        shares: Sequence[Share],
        q: Tensor,
        window: int = 0,
        *,
        out: Tensor | None = None,
        rule: LayerRule = PLAIN,
    ) -> Tensor:
        """q: [T, Hq, D], a view; returns [T, Hq, D]. The scratch ends with bytes that must stay as they are."""
        _, num_heads, head_dim = q.shape
        counts = [share.num_tokens for share in shares]
        tables = [list(share.table[: -(-(share.start + share.num_tokens) // planes.shape[3])]) for share in shares]
        first_token = _whole([sum(counts[:i]) for i in range(len(shares))])
        start, num_tokens = _whole([share.start for share in shares]), _whole(counts)
        table_begin = _whole([sum(map(len, tables[:i])) for i in range(len(shares))])
        block_tables = _whole([block for table in tables for block in table])
        num_bytes = self._kernels.attention_scratch(len(shares), head_dim)
        memory = torch.full((num_bytes + 128,), 0xFF, dtype=torch.uint8)
        offset = -memory.data_ptr() % 64
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        arguments = BatonAttention(
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
            rule.scale_of(head_dim),
            num_heads,
            window,
            None if rule.sinks is None else rule.sinks.data_ptr(),
            rule.cap or 0.0,
        )
        self._kernels.attention(arguments)
        assert (memory[offset + num_bytes :] == 0xFF).all()
        return out


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _paged(planes: Tensor) -> BatonPagedKv:
    _, _, num_kv_heads, block_size, head_dim = planes.shape
    return BatonPagedKv(
        planes[:, 0].data_ptr(),
        planes[:, 1].data_ptr(),
        planes.stride(0),
        num_kv_heads,
        block_size,
        head_dim,
        DTYPES[planes.dtype],
        False,
    )
