"""Expected values are worked out by hand from the shapes; the two models' sums are published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.limits.model_shapes import ModelShapes

QWEN3_600M = ModelShapes(1024, 3072, 16, 8, 128, 151_936, (None,) * 28, 2)
LLAMA3_8B = ModelShapes(4096, 14_336, 32, 8, 128, 128_256, (None,) * 32, 2)


def test_a_decode_step_reads_the_weights_once_and_each_context() -> None:
    step = QWEN3_600M.decode_bytes([1024] * 16)
    assert step == QWEN3_600M.decode_weight_bytes + 16 * 1024 * 114_688
    assert 16 * 1024 * 114_688 / step == pytest.approx(0.61, abs=5e-3)


@pytest.mark.parametrize(
    ("shapes", "per_token", "per_square", "head"),
    [
        (QWEN3_600M, 880_803_840, 114_688, 2 * 151_936 * 1024),
        (LLAMA3_8B, 13_958_643_712, 262_144, 2 * 128_256 * 4096),
    ],
)
def test_operations_of_a_prompt(shapes: ModelShapes, per_token: int, per_square: int, head: int) -> None:
    for num_tokens in (1, 512, 8192):
        assert shapes.prefill_flop(num_tokens) == per_token * num_tokens + per_square * num_tokens**2 + head


def test_a_window_bounds_what_is_read_and_computed() -> None:
    some = replace(QWEN3_600M, windows=(None, 100))
    per_layer = 114_688 // 28
    assert some.kv_read_bytes(50) == 2 * 50 * per_layer
    assert some.kv_read_bytes(1000) == (1000 + 100) * per_layer
    whole = replace(QWEN3_600M, windows=(None, None))
    saved_pairs = (1000 - 100) ** 2 / 2  # the triangle that the window cuts off
    assert whole.prefill_flop(1000) - some.prefill_flop(1000) == 4 * 16 * 128 * saved_pairs
    assert whole.prefill_flop(100) == some.prefill_flop(100)
