"""Weights in MXFP4, as gpt-oss publishes its experts: 32 numbers of 4 bits, and one power of two for all of them.

Owns the format: bytes of two numbers each, the first in the lower half, behind each other along the inputs; scales are
exponents with an offset of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_BYTES = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_OFFSET = 127


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] in `dtype` of blocks [out, in / 32, 16] and scales [out, in / 32], both uint8. Exact but
    for numbers that the dtype cannot hold."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=dtype, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).to(torch.int64)
    exponents = scales.to(torch.int32)[..., None] - _EXPONENT_OFFSET
    return torch.ldexp(values[pairs], exponents).to(dtype).flatten(-2)
