"""Floors, and what is made of a relay's answers. Expected values are worked out by hand."""

from __future__ import annotations

import pytest

from baton.bench.gpu_check.relay_process import rows_of_answers
from baton.bench.gpu_check.rows import Verdict
from baton.bench.gpu_check.setup_process import Setup, block_bytes, busy_us, gb_per_s, model_shapes
from baton.bench.limits.model_shapes import Product
from baton.wire.errors import RequestFailed
from tests.bench.gpu_check.outcomes import answered


def test_the_models_are_the_published_ones() -> None:
    assert model_shapes("8B").decode_weight_bytes / 1e9 == pytest.approx(15.14, abs=5e-3)
    assert block_bytes("8B") == 16 * 147_456


def test_the_rate_of_a_model_is_weighted_by_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_ms = iter([1.0, 2.0])
    monkeypatch.setattr(Setup, "median_ms", lambda *_: next(taken_ms))
    products = [Product("a", 10, 10, 10, count=3), Product("b", 10, 10, 5, count=1)]
    rate = Setup("cpu", is_quick=True).gemm_tflop_per_s(products)
    assert rate == pytest.approx((3 * 2e3 + 1e3) / 5e-3 / 1e12)


def test_what_overlaps_counts_once() -> None:
    assert busy_us([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert gb_per_s(10**9, 1000.0) == pytest.approx(1.0)


def test_the_exposed_transfer_is_a_share_of_the_time_to_the_first_token() -> None:
    # 40 ms to the first token; 1 ms from the first token sampled until the KV is ready
    rows = rows_of_answers("case", [answered(ttft_ms=40.0, exposed_ms=1.0) for _ in range(3)])
    assert rows[0].value == pytest.approx(40.0, rel=0.01)
    assert rows[2].value == pytest.approx(2.5, rel=0.01)
    assert rows[2].verdict == Verdict.OK
    assert rows_of_answers("case", [answered(ttft_ms=40.0, exposed_ms=3.0)])[2].verdict == Verdict.BELOW


def test_an_answer_without_a_handoff_is_refused() -> None:
    outcome = answered(ttft_ms=40.0, exposed_ms=1.0)
    del outcome.usage["kv_transfer"]
    with pytest.raises(RequestFailed, match="without the stamps"):
        rows_of_answers("case", [outcome])
