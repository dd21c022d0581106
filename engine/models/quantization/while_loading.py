"""Quantizing a plain checkpoint while it is loaded: `--quantization int8` and `int4`.

Owns the rounding: to the nearest code, with the scale of a group's number furthest from zero. In 4 bits that number is
the code -8, whatever its sign. All products are
quantized, the head's too, since it is the largest of a decode step; embeddings, norms, biases and routing stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.linear_weights import LoadedWeight, PlainWeight, QuantizedWeight
from engine.models.quantization.base import Piece, Unquantized, Unread
from wire.errors import InvalidSetting

AUTO, INT8, INT4 = "auto", "int8", "int4"
_INT8_LARGEST, _INT4_LARGEST = 127, 8
_INT4_GROUPS = (32,)
_LARGEST_CODES = {_INT8_LARGEST: 127, _INT4_LARGEST: 7}
_ROWS_AT_ONCE = 4096
"""Rows that are rounded together: what they take in float32 is little beside a model."""


class Int8:
    """One scale for each output. See `Quantization`."""

    name = INT8

    def unread(self, piece: Piece) -> Unread | None:
        """See `Quantization`."""
        return None

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """See `Quantization`."""
        if not isinstance(weight, PlainWeight):
            return weight
        codes, scales = _rounded(weight.matrix, weight.matrix.shape[1], _INT8_LARGEST)
        return QuantizedWeight(codes, scales, None, weight.matrix.shape[1], weight.matrix.dtype)

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """See `Quantization`."""
        return num_out * (num_in + 4)


class Int4(Int8):
    """Groups of 32 inputs; what they do not divide gets 8 bits. See `Quantization`."""

    name = INT4

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """See `Quantization`. The scales are rounded to what float16 holds."""
        if not isinstance(weight, PlainWeight):
            return weight
        group_size = _group_size(weight.matrix.shape[1])
        if group_size == 0:
            return super().quantized(weight)
        codes, scales = _rounded(weight.matrix, group_size, _INT4_LARGEST)
        pairs = (codes + 8).view(torch.uint8)
        packed = pairs[:, ::2] | pairs[:, 1::2] << 4
        return QuantizedWeight(packed, scales, None, group_size, weight.matrix.dtype)

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """See `Quantization`."""
        group_size = _group_size(num_in)
        return num_out * (num_in // 2 + num_in // group_size * 2) if group_size else super().held_bytes(num_out, num_in)


def quantization_while_loading(setting: str) -> Unquantized | Int8:
    """What `--quantization` asks for. Raises `InvalidSetting` for a name that is not known."""
    if setting not in WHILE_LOADING:
        raise InvalidSetting(f"quantization {setting!r:.50} is not known; allowed: {', '.join(WHILE_LOADING)}")
    return WHILE_LOADING[setting]()


WHILE_LOADING: dict[str, type[Unquantized | Int8]] = {AUTO: Unquantized, INT8: Int8, INT4: Int4}
"""By the values of the setting."""


def _group_size(num_in: int) -> int:
    return next((size for size in _INT4_GROUPS if num_in % size == 0), 0)


def _rounded(matrix: Tensor, group_size: int, largest: int) -> tuple[Tensor, Tensor]:
    """int8 codes of `matrix` [out, in] and float32 scales [out, in / group_size]."""
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty((len(matrix), matrix.shape[1] // group_size), dtype=torch.float32, device=matrix.device)
    for first in range(0, len(matrix), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        grouped = matrix[rows].to(torch.float32).view(-1, scales.shape[1], group_size)
        scale = grouped.abs().amax(2) / largest
        if largest == _INT4_LARGEST:
            furthest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))[:, :, 0]
            scale = (furthest / -largest).to(torch.float16).to(torch.float32)
        scales[rows] = scale
        # a group of zeros has the scale 0, and codes of 0
        inverse = torch.where(scale != 0, 1 / scale, 0)
        rounded = (grouped * inverse[:, :, None]).round_()
        codes[rows] = rounded.clamp_(-largest, _LARGEST_CODES[largest]).flatten(1).to(torch.int8)
    return codes, scales
