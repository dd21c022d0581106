"""Products of rows rounded to 8 bits, at every dispatch level: the numbers that numpy finds with whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from baton.engine.native.arguments import (
    DTYPES,
    SCALE_DTYPES,
    BatonQuantizedPack,
    BatonRoundedLinear,
    BatonRoundRows,
)
from baton.engine.native.library import Kernels
from tests.engine.native.compiled import kernels, needs_kernels
from tests.engine.native.linear_calls import guarded, guarded_copy
from tests.engine.native.test_quantized import E4M3, KINDS, random, random_codes
from tests.engine.native.test_quantized import SHAPES as QUANTIZED_SHAPES

pytestmark = needs_kernels
SCALED, SUMMED = 32, 16
# num_out, num_in, group size (0: all inputs), rows
SHAPES = (*[shape for shape in QUANTIZED_SHAPES if shape[2] % 16 == 0], (64, 144, 48, 70), (192, 4096, 32, 14))
KINDS_HERE = [kind for kind in KINDS if kind != "e4m3"]


def padded(values: np.ndarray, unit: int) -> np.ndarray:
    """[rows, units, unit], with zeros at the end."""
    rows, size = values.shape
    return np.pad(values, ((0, 0), (0, -size % unit))).reshape(rows, -1, unit)


def rounded(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [rows, places, 32] and scales [rows, places] of x."""
    values = padded(x.float().numpy(), SCALED)
    furthest = np.abs(values).max(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(furthest > 1e-30, np.float32(127) / furthest, np.float32(0))
        scales = np.where(furthest > 1e-30, furthest / np.float32(127), np.float32(0))
        numbers = np.rint(values * inverse[:, :, None])
    return numbers.astype(np.int64), scales


@dataclass
class Weight:
    """A random quantized weight that is packed for rounded rows, and its numbers: whole ones, each so many `unit`s."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    group_size: int
    packed: torch.Tensor
    fields: dict[str, int]
    unit: float

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """x times this, each operation rounded to float32 once, in the order of `rounded_linear.inl`."""
        numbers, x_scales = rounded(x)
        num_out, num_in = self.codes.shape
        units = [SCALED] if self.group_size == num_in else [n for n in (32, 16) if self.group_size % n == 0]
        unit = units[0]
        codes = padded(self.codes, unit)
        by_unit = padded(numbers.reshape(len(numbers), -1)[:, :num_in], unit)
        dots = np.einsum("tuk,nuk->tnu", by_unit, codes).astype(np.float32)
        sums = by_unit.sum(2).astype(np.float32)
        found = np.zeros((len(numbers), num_out), np.float32)
        of_scale = np.zeros_like(found)
        for place in range(dots.shape[2]):
            group = place * unit // self.group_size
            of_unit = dots[:, :, place] * (self.scales[None, :, group] * np.float32(self.unit))
            if self.offsets is not None:
                of_unit = of_unit + self.offsets[None, :, group] * sums[:, place, None]
            is_first = place * unit % SCALED == 0
            of_scale = of_unit if is_first else of_scale + of_unit
            if (place + 1) * unit % SCALED == 0 or place + 1 == dots.shape[2]:
                found = found + of_scale * x_scales[:, place * unit // SCALED, None]
        return torch.from_numpy(found)

    def product(
        self, pool: Kernels, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = round_rows(pool, x)
        given = BatonRoundedLinear(
            out=out.data_ptr(),
            x=rows.data_ptr(),
            packed=self.packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            num_tokens=len(x),
            out_stride=out.stride(0),
            x_stride=rows.stride(0),
            dtype=DTYPES[x.dtype],
            out_is_float32=int(out.dtype == torch.float32),
            has_offsets=int(self.offsets is not None),
            **self.fields,
        )
        pool.rounded_linear(given)
        return out


def round_rows(pool: Kernels, x: torch.Tensor) -> torch.Tensor:
    num_rows, size = x.shape
    out = guarded((num_rows, pool.rounded_bytes(size)), torch.uint8, pool.rounded_bytes(size))
    pool.round_rows(
        BatonRoundRows(out.data_ptr(), x.data_ptr(), num_rows, size, out.stride(0), x.stride(0), DTYPES[x.dtype])
    )
    return out


def packed(
    pool: Kernels, kind: str, shape: tuple[int, int, int], *, has_offsets: bool, scale_dtype: torch.dtype
) -> Weight:
    num_out, num_in, group_size = shape[0], shape[1], shape[2] or shape[1]
    generator = torch.Generator().manual_seed(sum(shape))
    size = (num_out, num_in // group_size)
    scales = torch.rand(size, generator=generator).add_(0.1).to(scale_dtype).float()
    offsets = torch.randn(size, generator=generator).to(scale_dtype).float()
    codes, values = random_codes(kind, (num_out, num_in), generator)
    fields = {
        "num_out": num_out,
        "num_in": num_in,
        "group_size": group_size,
        "codes_kind": KINDS[kind],
        "scale_dtype": SCALE_DTYPES[scale_dtype],
    }
    codes = guarded_copy(codes, codes.shape[1] + 3)
    kept = [guarded_copy(scales), guarded_copy(offsets)]
    given = BatonQuantizedPack(
        codes=codes.data_ptr(),
        scales=kept[0].data_ptr(),
        offsets=kept[1].data_ptr() if has_offsets else None,
        codes_stride=codes.stride(0),
        **fields,
    )
    memory = guarded((pool.rounded_pack_bytes(given),), torch.uint8).fill_(0xFF)
    given.packed = memory.data_ptr()
    pool.rounded_pack(given)
    unit = 0.5 if kind == "e2m1" else 1.0
    numbers = (values.numpy() / unit).astype(np.int64)
    return Weight(numbers, scales.numpy(), offsets.numpy() if has_offsets else None, group_size, memory, fields, unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_to_the_nearest_of_their_scale(level: str, dtype: torch.dtype) -> None:
    pool = kernels(level, 1)
    for num_rows, size in ((1, 1), (3, 64), (7, 100), (200, 777)):
        x = guarded_copy(random((num_rows, size), dtype) * 3, size + 5)
        x[-1] = 0
        numbers, scales = rounded(x)
        places, flat = numbers.shape[1], numbers.reshape(num_rows, -1)
        row = round_rows(pool, x).numpy()
        assert (row[:, : places * SCALED].view(np.int8) == flat).all()
        found = row[:, places * SCALED :][:, : places * 4].copy().view(np.float32)
        assert (found == scales).all()
        sums = row[:, places * (SCALED + 4) :][:, : places * SCALED // SUMMED * 4].copy().view(np.int32)
        assert (sums == flat.reshape(num_rows, -1, SUMMED).sum(2)).all()


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_products_are_those_of_whole_numbers_bit_for_bit(level: str, kind: str) -> None:
    pool, dtypes = kernels(level, 1), list(DTYPES)
    for number, (num_out, num_in, group_size, rows) in enumerate(SHAPES):
        dtype = dtypes[number // 3 % 3]
        scale_dtype = (torch.float16, torch.float32, torch.float8_e8m0fnu)[number % 3]
        for has_offsets in (False, True)[: 1 if scale_dtype == torch.float8_e8m0fnu else 2]:
            shape = (num_out, num_in, group_size)
            weight = packed(pool, kind, shape, has_offsets=has_offsets, scale_dtype=scale_dtype)
            x = guarded_copy(random((rows, num_in), dtype), num_in + number)
            bias = guarded_copy(random((num_out,), dtype))
            expected = weight.expected(x)
            for out_dtype in {dtype, torch.float32}:
                out = guarded((rows, num_out), out_dtype, num_out + 3)
                whole = out.as_strided((rows - 1, num_out + 3), (num_out + 3, 1)).fill_(7.0)
                assert torch.equal(weight.product(pool, x, out), expected.to(out_dtype))
                assert torch.equal(weight.product(pool, x, out, bias), (expected + bias.float()).to(out_dtype))
                assert (whole[:, num_out:] == 7.0).all()


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_a_row_does_not_depend_on_other_rows_or_threads(level: str, kind: str) -> None:
    shape = (70, 512, 32)
    weight = packed(kernels(level, 1), kind, shape, has_offsets=True, scale_dtype=torch.float16)
    x = random((203, 512), torch.bfloat16)
    whole = weight.product(kernels(level, 1), x, guarded((203, 70), torch.float32))
    for rows in (*range(1, 71), 193):
        for pool, first in ((kernels(level, 1), 203 - rows), (kernels(level, 2), 3)):
            part = x[first : first + rows]
            out = guarded((len(part), 70), torch.float32)
            assert torch.equal(weight.product(pool, part, out), whole[first : first + rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_makes_no_numbers_of_its_row_alone(level: str, value: float) -> None:
    pool = kernels(level, 1)
    weight = packed(pool, "int4", (70, 256, 32), has_offsets=True, scale_dtype=torch.float16)
    x = random((3, 256), torch.bfloat16)
    expected = weight.expected(x)
    x[1, 77] = value
    found = weight.product(pool, x, guarded((3, 70), torch.float32))
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


def test_what_has_no_such_product_takes_no_bytes(level: str) -> None:
    pool = kernels(level, 1)
    for kind, group_size in ((KINDS["int8"], 24), (KINDS["int4"], 8), (E4M3, 32)):
        given = BatonQuantizedPack(num_out=5, num_in=96, group_size=group_size, codes_kind=kind)
        assert pool.rounded_pack_bytes(given) == 0


def test_sizes_of_zero(level: str) -> None:
    pool = kernels(level, 1)
    weight = packed(pool, "int8", (5, 32, 0), has_offsets=False, scale_dtype=torch.float32)
    weight.product(pool, guarded((1, 32), torch.bfloat16)[:0], guarded((1, 5), torch.bfloat16)[:0])
