"""The operations of a decoder on a CPU: torch's, but for products, which are oneDNN's with weights in its own layout.

Owns the choice of the weights that are packed. The rest of the product's speed is oneDNN's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.models.linear_weights import LinearWeight, LoadedWeight, PackedWeight, PlainWeight
from baton.engine.models.ops.torch_ops import TorchOps

_PACK_MIN_ELEMENTS = 1 << 17
"""Smaller matrices fit a cache: there the fixed cost of the packed product is more than it saves."""
_PACK_ROWS = 16
"""Row count the packed layout is chosen for. Measured: within a few percent of the best for 1 to 256 rows."""


class CpuOps(TorchOps):
    """torch's operations, with oneDNN's packed products. Weights of at least `pack_min_elements` are packed, where this
    machine has a packed product for their dtype."""

    def __init__(self, pack_min_elements: int = _PACK_MIN_ELEMENTS) -> None:
        self._pack_min_elements = pack_min_elements

    def pack(self, weight: LoadedWeight) -> LinearWeight:
        """Pack a large plain weight for oneDNN. The packed weight is a copy; the plain one is freed with its last
        owner."""
        if not isinstance(weight, PlainWeight):
            return super().pack(weight)
        if weight.matrix.numel() < self._pack_min_elements or not _is_packable(weight.matrix.dtype):
            return weight
        return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.matrix, _PACK_ROWS))

    def linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """x W^T + b, [T, out], by oneDNN for a packed weight, and by torch for any other."""
        if isinstance(weight, PackedWeight):
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocked, bias, "none", [], "")
            return packed
        return super().linear(x, weight, bias)


def _is_packable(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
