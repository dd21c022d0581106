"""Calls the products of the CPU kernels, with memory that ends at a page nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.native.arguments import DTYPES, TOKEN_IDS, BatonGather, BatonLinear, BatonPack
from tests.engine.native.compiled import kernels

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(shape: Sequence[int], dtype: torch.dtype, row_stride: int | None = None) -> torch.Tensor:
    """Zeros whose last element is the last before a page that cannot be read or written. `row_stride`: of a matrix; the
    last row is not followed by the rest of its stride."""
    stride = row_stride if row_stride is not None else shape[-1]
    count = stride * (shape[0] - 1) + shape[1] if len(shape) == 2 and shape[0] > 0 else shape[0]
    size = max(count, 1) * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(address + pages * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    elements = torch.frombuffer(memory, dtype=dtype, count=max(count, 1), offset=pages * mmap.PAGESIZE - size)
    return elements.as_strided(tuple(shape), (stride, 1) if len(shape) == 2 else (1,))


def guarded_copy(values: torch.Tensor, row_stride: int | None = None) -> torch.Tensor:
    copy = guarded(values.shape, values.dtype, row_stride)
    copy.copy_(values)
    return copy


@dataclass
class Packed:
    memory: torch.Tensor
    num_out: int
    num_in: int
    dtype: torch.dtype


class Products:
    """One pool of threads at one dispatch level."""

    def __init__(self, level: str, num_threads: int) -> None:
        self._kernels = kernels(level, num_threads)

    def packed_bytes(self, dtype: torch.dtype, num_out: int, num_in: int) -> int:
        return self._kernels.packed_bytes(dtype, num_out, num_in)

    def pack(self, weight: torch.Tensor) -> Packed:
        num_out, num_in = weight.shape
        memory = guarded((self.packed_bytes(weight.dtype, num_out, num_in),), torch.uint8)
        memory.fill_(0xFF)  # not a number in every dtype
        dtype = DTYPES[weight.dtype]
        arguments = BatonPack(memory.data_ptr(), weight.data_ptr(), num_out, num_in, weight.stride(0), dtype)
        self._kernels.pack(arguments)
        return Packed(memory, num_out, num_in, weight.dtype)

    def rows(self, packed: Packed, places: torch.Tensor) -> torch.Tensor:
        """The rows [R, num_in] of what was packed that `places` [R] names."""
        out = guarded((len(places), packed.num_in), packed.dtype)
        row_bytes, dtype = packed.num_in * packed.dtype.itemsize, DTYPES[packed.dtype]
        table, held = packed.memory.data_ptr(), guarded_copy(places)
        gather = BatonGather(
            out.data_ptr(), table, held.data_ptr(), len(places), row_bytes, packed.num_out, TOKEN_IDS, dtype
        )
        self._kernels.gather(gather)
        return out

    def linear(
        self, out: torch.Tensor, x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        arguments = BatonLinear(
            out.data_ptr(),
            x.data_ptr(),
            packed.memory.data_ptr(),
            bias.data_ptr() if bias is not None else None,
            x.shape[0],
            packed.num_out,
            packed.num_in,
            out.stride(0),
            x.stride(0),
            DTYPES[packed.dtype],
            int(out.dtype == torch.float32),
        )
        self._kernels.linear(arguments)
        return out
