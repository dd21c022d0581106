from __future__ import annotations

import pytest
import torch

from baton.engine.native.arguments import DTYPES, SCALE_DTYPES, BatonQuantizedLinear, BatonQuantizedPack
from baton.engine.native.library import Kernels
from tests.engine.native.compiled import kernels, needs_kernels
from tests.engine.native.linear_calls import guarded, guarded_copy

pytestmark = needs_kernels
INT8, INT4, E4M3, E2M1 = 0, 1, 2, 3
KINDS = {"int8": INT8, "int4": INT4, "e4m3": E4M3, "e2m1": E2M1}
E2M1_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# num_out, num_in, group size (0: all inputs), rows
SHAPES = (
    (64, 64, 0, 1),
    (128, 256, 32, 6),
    (1, 1, 0, 1),
    (63, 32, 16, 7),
    (65, 33, 0, 4),
    (100, 384, 128, 3),
    (130, 777, 0, 13),
    (17, 1024, 64, 5),
    (33, 96, 32, 201),
    # more groups than the sums of their inputs are kept for, of few rows and of many
    (3, 8200, 2, 4),
    (66, 1024, 4, 120),
)


class Quantized:
    """A random quantized weight [num_out, num_in], what it stands for, and its products at one dispatch level."""

    def __init__(
        self,
        pool: Kernels,
        kind: str,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        *,
        has_offsets: bool = False,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_out, num_in, self.group_size = shape[0], shape[1], shape[2] or shape[1]
        generator = torch.Generator().manual_seed(sum(shape))
        groups = num_in // self.group_size
        scales = torch.rand((self.num_out, groups), generator=generator).add_(0.1).to(scale_dtype).float()
        has_offsets = has_offsets and scale_dtype != torch.float8_e8m0fnu
        offsets = torch.randn((self.num_out, groups), generator=generator).to(torch.float16).float()
        codes, values = random_codes(kind, (self.num_out, num_in), generator)
        wide = scales.double().repeat_interleave(self.group_size, 1)
        self.meaning = values * wide
        if has_offsets:
            self.meaning += offsets.double().repeat_interleave(self.group_size, 1)
        self.pool, self.dtype, self.num_in = pool, dtype, num_in
        self.fields = {
            "num_out": self.num_out,
            "num_in": num_in,
            "group_size": self.group_size,
            "dtype": DTYPES[dtype],
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
            **self.fields,
        )
        self.packed = guarded((pool.quantized_bytes(given),), torch.uint8).fill_(0xFF)
        given.packed = self.packed.data_ptr()
        pool.quantized_pack(given)
        self.has_offsets = has_offsets

    def product(
        self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, pool: Kernels | None = None
    ) -> torch.Tensor:
        given = BatonQuantizedLinear(
            out=out.data_ptr(),
            x=x.data_ptr(),
            packed=self.packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            num_tokens=x.shape[0],
            out_stride=out.stride(0),
            x_stride=x.stride(0),
            out_is_float32=int(out.dtype == torch.float32),
            has_offsets=int(self.has_offsets),
            **self.fields,
        )
        (pool or self.pool).quantized_linear(given)
        return out

    def error(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> float:
        """By how much the worst element differs more than the rounding of its steps and of the result allows."""
        exact = x.double() @ self.meaning.T + (bias.double() if bias is not None else 0.0)
        magnitude = x.double().abs() @ self.meaning.abs().T * 8 + x.double().abs().sum(1, keepdim=True) * 8 + 1e-30
        rounding = torch.finfo(out.dtype).eps * exact.abs() + 1e-7 if out.dtype != torch.float32 else 0.0
        return float(((out.double() - exact).abs() - rounding - magnitude * 2.0**-23).max())


def random_codes(kind: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as the kernels take them, and the numbers [out, in] that they stand for."""
    if kind == "int8":
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        return codes.view(torch.uint8), codes.double()
    if kind == "e4m3":
        codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 1
        return codes, codes.view(torch.float8_e4m3fn).double()
    padded = torch.zeros((shape[0], shape[1] + shape[1] % 2), dtype=torch.uint8)
    codes = padded[:, : shape[1]] = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    values = E2M1_VALUES[codes.long()] if kind == "e2m1" else codes.double() - 8
    return padded[:, ::2] | padded[:, 1::2] << 4, values


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_right_and_touch_nothing_else(level: str, kind: str, dtype: torch.dtype) -> None:
    pool = kernels(level, 1)
    for number, (num_out, num_in, group_size, rows) in enumerate(SHAPES):
        weight = Quantized(
            pool,
            kind,
            dtype,
            (num_out, num_in, group_size),
            has_offsets=number % 2 == 1,
            scale_dtype=(torch.float16, torch.float32, torch.float8_e8m0fnu)[number % 3],
        )
        x = guarded_copy(random((rows, num_in), dtype), num_in + number)
        bias = guarded_copy(random((num_out,), dtype))
        for out_dtype in {dtype, torch.float32}:
            out = guarded((rows, num_out), out_dtype, num_out + 3)
            whole = out.as_strided((rows - 1, num_out + 3), (num_out + 3, 1)).fill_(7.0)
            assert weight.error(weight.product(out, x), x) <= 0.0
            assert weight.error(weight.product(out, x, bias), x, bias) <= 0.0
            assert (whole[:, num_out:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_other_rows_or_threads(level: str, kind: str, dtype: torch.dtype) -> None:
    weight = Quantized(kernels(level, 1), kind, dtype, (70, 512, 64), has_offsets=True)
    x = random((203, 512), dtype)
    whole = weight.product(guarded((203, 70), torch.float32), x)
    for rows in (1, 2, 5, 6, 7, 13, 193):
        for pool, first in ((kernels(level, 1), 203 - rows), (kernels(level, 2), 3)):
            out = guarded((min(rows, 203 - first), 70), torch.float32)
            assert torch.equal(weight.product(out, x[first : first + rows], pool=pool), whole[first : first + rows])


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_zero(level: str, kind: str) -> None:
    weight = Quantized(kernels(level, 1), kind, torch.bfloat16, (5, 4, 0))
    weight.product(guarded((1, 5), torch.bfloat16)[:0], guarded((1, 4), torch.bfloat16)[:0])
    assert kernels(level, 1).quantized_bytes(BatonQuantizedPack(num_in=4, group_size=4, codes_kind=KINDS[kind])) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "group_size"), [("int8", 8), ("int4", 16), ("e4m3", 8)])
def test_a_group_lies_packed_as_it_does_alone(level: str, kind: str, group_size: int, dtype: torch.dtype) -> None:
    """Alone it is too short for squares of words, and is packed code by code."""
    pool = kernels(level, 1)
    for num_out, num_groups in ((64, 32), (70, 25), (1, 19)):
        generator = torch.Generator().manual_seed(num_out)
        codes, _ = random_codes(kind, (num_out, num_groups * group_size), generator)
        scales = torch.rand((num_out, num_groups), generator=generator)
        whole = packed_codes(pool, kind, dtype, group_size, codes, scales)
        row_bytes = codes.shape[1] // num_groups
        for group in range(num_groups):
            own = codes[:, group * row_bytes : (group + 1) * row_bytes].contiguous()
            alone = packed_codes(pool, kind, dtype, group_size, own, scales[:, group : group + 1].contiguous())
            of_group = whole.view(-1, num_groups, group_bytes(pool, kind, dtype, group_size))[:, group]
            assert torch.equal(of_group.flatten(), alone)


def packed_codes(
    pool: Kernels, kind: str, dtype: torch.dtype, group_size: int, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """A weight without offsets, packed."""
    given = BatonQuantizedPack(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        num_out=len(codes),
        num_in=scales.shape[1] * group_size,
        group_size=group_size,
        codes_stride=codes.stride(0),
        dtype=DTYPES[dtype],
        codes_kind=KINDS[kind],
        scale_dtype=DTYPES[torch.float32],
    )
    packed = guarded((pool.quantized_bytes(given),), torch.uint8).fill_(0xFF)
    given.packed = packed.data_ptr()
    pool.quantized_pack(given)
    return packed


def group_bytes(pool: Kernels, kind: str, dtype: torch.dtype, group_size: int) -> int:
    """Those of a group of one panel."""
    given = BatonQuantizedPack(num_out=1, num_in=group_size, group_size=group_size, dtype=DTYPES[dtype])
    given.codes_kind, given.scale_dtype = KINDS[kind], DTYPES[torch.float32]
    return pool.quantized_bytes(given)
