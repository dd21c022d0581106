from __future__ import annotations

import pytest
import torch

from tests.engine.native.compiled import needs_kernels
from tests.engine.native.linear_calls import Products, guarded, guarded_copy

pytestmark = needs_kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# num_out, num_in, rows: whole panels, parts of them, odd sizes, several stretches, several blocks of rows
SHAPES = (
    (64, 64, 1),
    (128, 256, 6),
    (1, 1, 1),
    (5, 3, 2),
    (63, 31, 7),
    (65, 33, 4),
    (100, 257, 3),
    (130, 777, 13),
    (70, 514, 64),
    (17, 1030, 5),
    (33, 70, 201),
    (130, 6, 800),
)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_is_product(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Each sum may be wrong by the rounding of its steps and of the result."""
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    magnitude = x.double().abs() @ weight.double().abs().T + 1e-30
    rounding = torch.finfo(out.dtype).eps * exact.abs() + 1e-7 if out.dtype != torch.float32 else 0.0
    excess = (out.double() - exact).abs() - rounding - magnitude * 2.0**-23 * (x.shape[1] ** 0.5 + 4)
    assert excess.max() <= 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_right_and_touch_nothing_else(products: Products, dtype: torch.dtype) -> None:
    for seed, (num_out, num_in, rows) in enumerate(SHAPES):
        weight = guarded_copy(random((num_out, num_in), dtype, seed), num_in + seed)
        x = guarded_copy(random((rows, num_in), dtype, seed + 100), num_in + seed)
        bias = guarded_copy(random((num_out,), dtype, seed + 200))
        packed = products.pack(weight)
        for out_dtype in {dtype, torch.float32}:
            out = guarded((rows, num_out), out_dtype, num_out + 3)
            whole = out.as_strided((rows - 1, num_out + 3), (num_out + 3, 1))
            whole.fill_(7.0)
            assert_is_product(products.linear(out, x, packed), x, weight)
            assert_is_product(products.linear(out, x, packed, bias), x, weight, bias)
            assert (whole[:, num_out:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_other_rows_or_threads(
    products: Products, two_threads_products: Products, dtype: torch.dtype
) -> None:
    weight, x = random((70, 519), dtype, 1), random((203, 519), dtype, 2)
    packed = products.pack(weight)
    whole = products.linear(guarded((203, 70), torch.float32), x, packed)
    for rows in (*range(1, 15), 64, 193):
        for pool, first in ((products, 0), (products, 203 - rows), (two_threads_products, 3)):
            out = pool.linear(guarded((min(rows, 203 - first), 70), torch.float32), x[first : first + rows], packed)
            assert torch.equal(out, whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_threads_pack_and_multiply_as_one_does(
    products: Products, two_threads_products: Products, dtype: torch.dtype
) -> None:
    weight, x = random((1000, 100), dtype, 3), random((9, 100), dtype, 4)
    one, two = products.pack(weight), two_threads_products.pack(weight)
    assert torch.equal(one.memory, two.memory)
    expected = products.linear(guarded((9, 1000), dtype), x, one)
    for _ in range(3):
        assert torch.equal(two_threads_products.linear(guarded((9, 1000), dtype), x, two), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_in_its_row_and_column(products: Products, dtype: torch.dtype) -> None:
    weight, x = random((70, 33), dtype, 5), random((8, 33), dtype, 6)
    x[3, 32] = float("inf")
    x[5, 0] = float("nan")
    weight[69, 7] = float("nan")
    out = products.linear(guarded((8, 70), dtype), x, products.pack(weight))
    finite = torch.ones(8, 70, dtype=torch.bool)
    finite[3] = finite[5] = False
    finite[:, 69] = False
    assert torch.equal(out.isfinite(), finite)
    assert out[3, :69].isinf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_of_zero(products: Products, dtype: torch.dtype) -> None:
    assert products.packed_bytes(dtype, 0, 5) == 0
    packed = products.pack(random((5, 4), dtype, 7))
    products.linear(guarded((1, 5), dtype)[:0], guarded((1, 4), dtype)[:0], packed)
    bias = random((5,), dtype, 8)
    nothing = products.pack(torch.empty((5, 0), dtype=dtype))
    out = products.linear(guarded((3, 5), dtype), torch.empty((3, 0), dtype=dtype), nothing, bias)
    assert torch.equal(out, bias.expand(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_what_was_packed_are_those_that_were_packed(
    products: Products, two_threads_products: Products, dtype: torch.dtype
) -> None:
    for seed, (num_out, num_in, num_rows) in enumerate(SHAPES):
        weight = random((num_out, num_in), dtype, seed)
        places = torch.randint(0, num_out, (num_rows + 2,), generator=torch.Generator().manual_seed(seed))
        places[0], places[-2], places[-1] = num_out - 1, num_out, -1
        for threads in (products, two_threads_products):
            found = threads.rows(threads.pack(weight), places)
            assert torch.equal(found[:-2], weight[places[:-2]])
            assert found[-2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_weights_lie_in_panels_step_after_step(products: Products, dtype: torch.dtype) -> None:
    for seed, (num_out, num_in, _) in enumerate(SHAPES):
        weight = random((num_out, num_in), dtype, seed)
        packed = products.pack(guarded_copy(weight, num_in + seed)).memory.view(dtype)
        num_inputs = 2 if dtype == torch.bfloat16 else 1
        num_of_panel = products.packed_bytes(torch.float32, 1, 1) // 4  # outputs, by the level
        num_panels, num_steps = -(-num_out // num_of_panel), -(-num_in // num_inputs)
        padded = torch.zeros((num_panels * num_of_panel, num_steps * num_inputs), dtype=dtype)
        padded[:num_out, :num_in] = weight
        expected = padded.view(num_panels, num_of_panel, num_steps, num_inputs).transpose(1, 2)
        assert torch.equal(packed.view(expected.shape).view(torch.uint8), expected.contiguous().view(torch.uint8))
