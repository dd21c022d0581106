"""Quantizing a plain checkpoint while it is loaded: `--quantization int8` and `int4`.

Owns the rounding, which looks at nothing but the weights. int8: groups of 64 inputs, to the nearest code with the scale
of the group's number furthest from zero. int4: groups of 32 with a scale and an offset; of four ranges of codes that
whose best scale and offset leave the smallest squared error. All products are quantized, the head's too, since it is
the largest of a decode step; embeddings, norms, biases and routing stay. The CPU kernels do the same, operation by
operation (`baton/engine/native/src/quantize.inl`).

Invariant: what a number becomes depends on its group alone. A rank that has whole groups has the numbers that one node
has, so nodes with different numbers of ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.models.linear_weights import LoadedWeight, PlainWeight, QuantizedWeight
from baton.engine.models.ops.native_quantized import quantize
from baton.engine.models.quantization.base import Piece, Unquantized, Unread
from baton.engine.native.library import Kernels
from baton.wire.errors import InvalidSetting

AUTO, INT8, INT4 = "auto", "int8", "int4"
_INT8_GROUP, _LARGEST_INT8 = 64, 127
_INT4_GROUP, _TOP_CODE, _MIDDLE_CODE = 32, 15, 8
_RANGES = (15.0, 14.2, 15.8, 16.6)
"""Of codes that a group's numbers are spread over; what lies beyond the outermost codes has these."""
_NUMBERS_AT_ONCE = 1 << 16
"""Rounded together: with what is made of them they stay in the second cache."""
_SMALLEST_HALF = 2.0**-14
"""Below, float16 has fewer bits: such scales stay float32."""


class Int8:
    """8 bits a weight, in groups of 64 inputs. Where 64 does not divide the inputs, each output is one group. See
    `Quantization`."""

    name = INT8
    is_published = False

    def __init__(self, kernels: Kernels | None = None) -> None:
        """`kernels`: those of a CPU, which give the same numbers; None: torch computes."""
        self._kernels = kernels

    def unread(self, piece: Piece) -> Unread | None:
        """None: the checkpoint is plain."""
        return None

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """The weight [out, in] with int8 codes and a scale for each group of inputs."""
        if not isinstance(weight, PlainWeight):
            return weight
        matrix, group_size = weight.matrix, _int8_group(weight.matrix.shape[1])
        if self._kernels is not None:
            return quantize(self._kernels, matrix, group_size, torch.int8)
        codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        shape = (len(matrix), matrix.shape[1] // group_size)
        scales = torch.empty(shape, dtype=torch.float32, device=matrix.device)
        for rows in _parts(matrix):
            codes[rows], scales[rows] = _in_8_bits(matrix[rows], group_size)
        return QuantizedWeight(codes, scales, None, group_size, matrix.dtype)

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of codes and scales of a weight [num_out, num_in]."""
        return num_out * (num_in + num_in // _int8_group(num_in) * 2)


class Int4(Int8):
    """4 bits a weight, in groups of 32 inputs. A matrix whose inputs 32 does not divide gets 8 bits. See
    `Quantization`."""

    name = INT4

    def quantized(self, weight: LoadedWeight) -> LoadedWeight:
        """The weight [out, in] with int4 codes, scales and offsets; as int8 where its inputs are no multiple of 32."""
        if not isinstance(weight, PlainWeight) or weight.matrix.shape[1] % _INT4_GROUP:
            return super().quantized(weight)
        matrix = weight.matrix
        if self._kernels is not None:
            return quantize(self._kernels, matrix, _INT4_GROUP, torch.uint8)
        num_out, num_in = matrix.shape
        codes = torch.empty((num_out, num_in // 2), dtype=torch.uint8, device=matrix.device)
        scales = torch.empty((num_out, num_in // _INT4_GROUP), dtype=torch.float32, device=matrix.device)
        offsets = torch.empty_like(scales)
        for rows in _parts(matrix):
            codes[rows], scales[rows], offsets[rows] = _in_4_bits(matrix[rows])
        return QuantizedWeight(codes, scales, offsets, _INT4_GROUP, matrix.dtype)

    def held_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of codes, scales and offsets of a weight [num_out, num_in]."""
        if num_in % _INT4_GROUP:
            return super().held_bytes(num_out, num_in)
        return num_out * (num_in // 2 + num_in // _INT4_GROUP * 4)


def quantization_while_loading(setting: str, kernels: Kernels | None = None) -> Unquantized | Int8:
    """The method that `--quantization` asks for. Raises `InvalidSetting` for a name that is not known."""
    if setting not in WHILE_LOADING:
        raise InvalidSetting(f"quantization {setting!r:.50} is not known; allowed: {', '.join(WHILE_LOADING)}")
    method = WHILE_LOADING[setting]
    return method(kernels) if issubclass(method, Int8) else method()


WHILE_LOADING: dict[str, type[Unquantized | Int8]] = {AUTO: Unquantized, INT8: Int8, INT4: Int4}
"""By the values of the setting."""


def _int8_group(num_in: int) -> int:
    return num_in if num_in % _INT8_GROUP else _INT8_GROUP


def _parts(matrix: Tensor) -> Iterator[slice]:
    """Some rows after the others."""
    at_once = max(1, _NUMBERS_AT_ONCE // matrix.shape[1])
    return (slice(first, first + at_once) for first in range(0, len(matrix), at_once))


def _in_8_bits(matrix: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """int8 codes of `matrix` [out, in] and scales [out, in / group_size]."""
    numbers = matrix.to(torch.float32).view(len(matrix), -1, group_size)
    low, high = numbers.aminmax(dim=2)
    scales = _rounded_scales(torch.maximum(high, -low) / _LARGEST_INT8)
    codes = (numbers * _inverse(scales)[:, :, None]).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8)
    return codes.view(matrix.shape).to(torch.int8), scales


def _in_4_bits(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in / 2] of `matrix` [out, in], two in a byte, and scales and offsets [out, in / 32]."""
    # the numbers of a group one below the other: sums over them are sums of long rows
    numbers = matrix.to(torch.float32).view(-1, _INT4_GROUP).T.contiguous()
    low, high = numbers.amin(0), numbers.amax(0)
    mean = numbers.mean(0)
    fit, scales, offsets = torch.zeros_like(mean), torch.zeros_like(mean), mean.clone()
    for number in _RANGES:
        inverse = number * _inverse(high - low)
        codes = torch.addcmul((_TOP_CODE - number) / 2 - low * inverse, numbers, inverse).round_().clamp_(0, _TOP_CODE)
        middle = codes.mean(0)
        covariance = (codes * numbers).mean(0) - middle * mean
        variance = codes.square_().mean(0) - middle * middle
        slope = covariance * _inverse(variance)
        # the squared error is what the numbers vary, less what the codes explain of it
        explained = slope * covariance
        is_better = explained > fit
        fit = torch.where(is_better, explained, fit)
        scales = torch.where(is_better, slope, scales)
        offsets = torch.where(is_better, mean - slope * middle, offsets)
    scales = _rounded_scales(scales)
    offsets = offsets + scales * _MIDDLE_CODE
    offsets = torch.where(scales < _SMALLEST_HALF, offsets, offsets.to(torch.float16).to(torch.float32))
    codes = torch.addcmul(_MIDDLE_CODE - offsets * _inverse(scales), numbers, _inverse(scales))
    rows = codes.round_().clamp_(0, _TOP_CODE).to(torch.uint8).T.reshape(len(matrix), -1)
    by_group = (len(matrix), -1)
    return rows[:, ::2] | rows[:, 1::2] << 4, scales.view(by_group), offsets.view(by_group)


def _rounded_scales(scales: Tensor) -> Tensor:
    """What float16 holds, which takes half the memory."""
    return torch.where(scales < _SMALLEST_HALF, scales, scales.to(torch.float16).to(torch.float32))


def _inverse(numbers: Tensor) -> Tensor:
    """1 / number, and 0 of 0: a group of equal numbers has the scale 0."""
    return torch.where(numbers != 0, 1 / numbers, 0)
