"""Weights in MXFP4, as gpt-oss publishes its experts: 32 numbers of 4 bits, and one power of two for all of them.

Owns the format: bytes of two numbers each, the first in the lower half, behind each other along the inputs; scales are
exponents with an offset of 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.models.expert_settings import MXFP4_GROUP
from baton.engine.models.linear_weights import QuantizedWeight

GROUP_BYTES = 16
_EXPONENT_OFFSET = 127


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """The weight [out, in], to multiply numbers in `dtype`, of blocks [out, in / 32, 16] and scales [out, in / 32],
    both uint8. It reads the blocks where they lie."""
    powers = torch.exp2(scales.to(torch.float32) - _EXPONENT_OFFSET)
    codes = blocks.flatten(1).view(torch.float4_e2m1fn_x2)
    return QuantizedWeight(codes, powers, None, MXFP4_GROUP, dtype)
