"""Floors by numbers that were worked out by hand, not by the formulas."""

from __future__ import annotations

import pytest

from bench.gpu_check import floors
from bench.gpu_check.shapes import block_bytes, config_of, model_shapes
from bench.limits.model_shapes import Product


def test_a_decode_step_of_the_8b_shape_reads_its_weights_and_every_context() -> None:
    # 36 layers of 192,937,984 weights and a head of 151,936 x 4,096, in bfloat16: 15.136 GB; 147,456 bytes a token
    weights = 2 * (36 * 192_937_984 + 151_936 * 4096)
    assert weights == 15_136_194_560
    alone = floors.decode_floor_ms(model_shapes("8B"), [1024], gb_per_s=4000.0)
    assert alone == pytest.approx((15_136_194_560 + 1024 * 147_456) / 4000e9 * 1e3)
    assert alone == pytest.approx(3.8218, abs=1e-4)
    together = floors.decode_floor_ms(model_shapes("8B"), [1024] * 64, gb_per_s=4000.0)
    assert together - alone == pytest.approx(63 * 1024 * 147_456 / 4e9)
    # twice the bandwidth, half of the time
    assert floors.decode_floor_ms(model_shapes("8B"), [1024], gb_per_s=8000.0) == pytest.approx(alone / 2)


def test_a_small_model_reads_its_head_though_it_is_the_embedding() -> None:
    # 0.4404 G linear weights and 151,936 x 1,024 of the head: 1.192 GB
    floor_ms = floors.decode_floor_ms(model_shapes("0.6B"), [0], gb_per_s=1000.0)
    assert floor_ms == pytest.approx(1.192, abs=1e-3)


def test_a_prompt_of_8192_tokens_is_133_6_tflop_of_the_8b_shape() -> None:
    # 13.891 GFLOP and, squared, 294,912 FLOP a token; the head for one token
    flop = 2 * 36 * 192_937_984 * 8192 + 294_912 * 8192**2 + 2 * 151_936 * 4096
    assert flop == pytest.approx(133.59e12, rel=1e-4)
    assert floors.prefill_floor_ms(model_shapes("8B"), 8192, tflop_per_s=700.0) == pytest.approx(flop / 700e12 * 1e3)


def test_products_count_as_often_as_the_model_has_them() -> None:
    products = [Product("big", 2, 3, 5, count=4), Product("small", 1, 1, 1, count=10)]
    # 4 x 60 and 10 x 2 operations; 4 x 2 ms and 10 x 1 ms
    assert floors.weighted_tflop_per_s(products, [2.0, 1.0]) == pytest.approx(260 / 18e-3 / 1e12)
    with pytest.raises(ValueError, match="zip"):
        floors.weighted_tflop_per_s(products, [2.0])


def test_rates_are_in_units_of_1e9() -> None:
    assert floors.gb_per_s(3 * 10**9, 1000.0) == 3.0


@pytest.mark.parametrize(
    ("intervals", "busy"),
    [
        ([], 0.0),
        ([(0.0, 2.0), (5.0, 6.0)], 3.0),
        ([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)], 4.0),
        ([(0.0, 10.0), (2.0, 3.0), (9.0, 11.0)], 11.0),
        ([(1.0, 1.0)], 0.0),
    ],
)
def test_a_device_is_busy_once_however_much_runs_beside_each_other(
    intervals: list[tuple[float, float]], busy: float
) -> None:
    assert floors.busy_us(intervals) == pytest.approx(busy)


def test_tokens_are_shared_up_to_the_first_that_differs() -> None:
    assert floors.prefix_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert floors.prefix_share([7], [1, 2]) == 0.0
    assert floors.prefix_share([1, 2, 3], [1, 2]) == 1.0


def test_a_block_of_the_8b_shape_is_2_25_mib() -> None:
    assert block_bytes("8B", 16) == 9 * 2**18
    assert config_of("8B")["eos_token_id"] < 151_936
