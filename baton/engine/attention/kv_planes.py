"""Keys, or values, of one layer in the pool, as rows that the torch backend stores and gathers.

Owns how numbers become codes of 8 bits with a scale for each token and head, and back; the CPU kernels do exactly the
same (`baton/engine/native/src/attention_codes.inl`). The scale is the least power of two for which every code of the
token's head is a number (448 at most), so it costs no precision: what attention computes with is exactly the codes
times it, in the dtype of the queries.

A head row is one head of one block, a token row one token of it. Where they lie is the backend's knowledge.

Letters: R head rows, T token rows, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_LEAST_SCALE = 10
"""The least normal number of float32 is the least code, 2^-9, times 2^(10 - 127)."""
_BEYOND_LARGEST = (1 << 21) - 1
"""Added to the bits of a float32 it raises the exponent of those whose fraction is above 1.75, as that of 448 is."""
_EXPONENT_OF_LARGEST = 8
_NO_NUMBERS = 255
"""The scale of a row that holds something infinite, or no number: that times a code 0 is no number."""


class Plane(Protocol):
    """Keys or values of a layer, of all blocks."""

    def store(self, rows: Tensor, values: Tensor) -> None:
        """Put values [T, Hkv, D] into token rows; rows: [T * Hkv]."""
        ...

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Write head rows [R] into out [R, block_size * D]."""
        ...


class PlainPlane:
    """Keys or values in the dtype of the pool. See `Plane`."""

    def __init__(self, heads: Tensor, head_dim: int) -> None:
        """heads: [head rows, block_size * D]."""
        self._heads = heads
        self._tokens = heads.view(-1, head_dim)

    def store(self, rows: Tensor, values: Tensor) -> None:
        """Write `values` [T, Hkv, D] to token rows `rows` [T * Hkv], as they are."""
        self._tokens.index_copy_(0, rows, values.reshape(-1, self._tokens.shape[1]))

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Copy head rows `rows` [R] into `out` [R, block_size * D]."""
        torch.index_select(self._heads, 0, rows, out=out)


class ScaledPlane:
    """Keys or values in codes of 8 bits with scales. See `Plane`."""

    def __init__(self, heads: Tensor, block_size: int, head_dim: int) -> None:
        """heads: [head rows, block_size * (D + 1)], bytes."""
        self._heads = heads
        self._num_codes = block_size * head_dim
        self._codes = heads[:, : self._num_codes].view(-1, block_size, head_dim)
        self._scales = heads[:, self._num_codes :]

    def store(self, rows: Tensor, values: Tensor) -> None:
        """Encode `values` [T, Hkv, D] in 8 bits; write codes and scales to token rows `rows` [T * Hkv]."""
        _, block_size, head_dim = self._codes.shape
        codes, scales = encoded(values.reshape(-1, head_dim))
        places = (rows // block_size, rows % block_size)
        self._codes.index_put_(places, codes)
        self._scales.index_put_(places, scales)

    def gather(self, rows: Tensor, out: Tensor) -> None:
        """Decode head rows `rows` [R] into `out` [R, block_size * D]."""
        found = torch.index_select(self._heads, 0, rows)
        codes = found[:, : self._num_codes].view(len(found), *self._codes.shape[1:])
        out.copy_(decoded(codes, found[:, self._num_codes :]).flatten(1))


def encoded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, D] and scales [T] of rows [T, D], as bytes."""
    wide = rows.to(torch.float32)
    largest = wide.abs().amax(-1)
    exponents = ((largest.view(torch.int32) + _BEYOND_LARGEST) >> 23) - _EXPONENT_OF_LARGEST
    scales = exponents.clamp(min=_LEAST_SCALE).where(largest.isfinite(), _NO_NUMBERS)
    inverse = ((2 * 127 - scales) << 23).view(torch.float32)
    codes = (wide * inverse[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(scales[:, None] == _NO_NUMBERS, 0), scales.to(torch.uint8)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers [..., D] in float32 of codes [..., D] and scales [...]."""
    powers = (scales.to(torch.int32) << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * powers[..., None]
