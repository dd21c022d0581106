"""Quantized weights in the layouts of Baton's CPU kernels: for x as it is, or for rows of x rounded to 8 bits.

Owns the choice of how scales are kept: in 8 or 16 bits where that changes none of them, else in 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.models.linear_weights import QuantizedWeight
from baton.engine.native.arguments import (
    DTYPES,
    SCALE_DTYPES,
    BatonQuantize,
    BatonQuantizedLinear,
    BatonQuantizedPack,
    BatonRoundedLinear,
    BatonRoundRows,
)
from baton.engine.native.library import Kernels, WeightMemory

_CODES = {torch.int8: 0, torch.uint8: 1, torch.float8_e4m3fn: 2, torch.float4_e2m1fn_x2: 3}
"""`BatonCodes`."""


def pack_quantized(
    kernels: Kernels, memory: WeightMemory, weight: QuantizedWeight, *, for_rounded: bool = False
) -> tuple[Tensor, BatonQuantizedLinear]:
    """The packed weight, and the arguments of a product with it but for those that belong to its tokens. `for_rounded`:
    for rounded rows, where the kernels have such a product with the weight."""
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    given = BatonQuantizedPack(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        offsets=None if offsets is None else offsets.data_ptr(),
        num_out=weight.num_rows,
        num_in=weight.num_in,
        group_size=weight.group_size,
        codes_stride=codes.stride(0),
        dtype=DTYPES[weight.dtype],
        codes_kind=_CODES[codes.dtype],
        scale_dtype=SCALE_DTYPES[_kept_dtype(scales, offsets)],
    )
    rounded_bytes = kernels.rounded_pack_bytes(given) if for_rounded else 0
    packed = memory.take(rounded_bytes or kernels.quantized_bytes(given))
    given.packed = packed.data_ptr()
    pack = kernels.rounded_pack if rounded_bytes else kernels.quantized_pack
    kind = BatonRoundedLinear if rounded_bytes else BatonQuantizedLinear
    pack(given)
    product = kind(
        packed=given.packed,
        num_out=given.num_out,
        num_in=given.num_in,
        group_size=given.group_size,
        dtype=given.dtype,
        codes_kind=given.codes_kind,
        scale_dtype=given.scale_dtype,
        has_offsets=int(offsets is not None),
    )
    return packed, product


def round_rows(kernels: Kernels, x: Tensor) -> Tensor:
    """The rows of x [T, in] rounded to 8 bits, as opaque bytes [T, ...] for all products that they go into."""
    num_rows, size = x.shape
    rows = kernels.empty((num_rows, kernels.rounded_bytes(size)), torch.uint8)
    kernels.round_rows(
        BatonRoundRows(rows.data_ptr(), x.data_ptr(), num_rows, size, rows.stride(0), x.stride(0), DTYPES[x.dtype])
    )
    return rows


def quantize(kernels: Kernels, matrix: Tensor, group_size: int, codes_dtype: torch.dtype) -> QuantizedWeight:
    """A plain matrix [out, in], quantized as by `baton.engine.models.quantization.while_loading`, in a hundredth of the
    time."""
    num_out, num_in = matrix.shape
    has_offsets, matrix = codes_dtype == torch.uint8, matrix.contiguous()
    codes = torch.empty((num_out, num_in // 2 if has_offsets else num_in), dtype=codes_dtype)
    scales, offsets = torch.empty((2, num_out, num_in // group_size), dtype=torch.float32)
    given = BatonQuantize(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        offsets=offsets.data_ptr(),
        weight=matrix.data_ptr(),
        num_groups=scales.numel(),
        group_size=group_size,
        dtype=DTYPES[matrix.dtype],
        codes_kind=_CODES[codes_dtype],
    )
    kernels.quantize(given)
    return QuantizedWeight(codes, scales, offsets if has_offsets else None, group_size, matrix.dtype)


def _kept_dtype(scales: Tensor, offsets: Tensor | None) -> torch.dtype:
    """The smallest dtype that changes neither."""
    if offsets is None and _are_powers_of_two(scales):
        return torch.float8_e8m0fnu
    kept = (scales,) if offsets is None else (scales, offsets)
    return torch.float16 if all(_fits_half(values) for values in kept) else torch.float32


def _are_powers_of_two(scales: Tensor) -> bool:
    """Positive, and normal numbers."""
    bits = scales.view(torch.int32)
    return not bool((bits & 0x7FFFFF).any()) and bool(((bits > 0) & (bits < 0x7F800000)).all())


def _fits_half(values: Tensor) -> bool:
    return torch.equal(values.to(torch.float16).to(torch.float32), values)
