from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from bench.limits.engine_ratios import EngineMeasurement, engine_limits

from bench.child import Child
from bench.limits.model_shapes import ModelShapes
from bench.limits.settings import ENGINE_NAMES, SYSTEM_NAMES, LimitsSettings
from wire.errors import BatonError

SHAPES = ModelShapes(1024, 3072, 16, 8, 128, 151_936, (None,) * 28, 2)
QUICK = LimitsSettings(quick=True)
QUICK_BUFFER_BYTES = 2**22


class FakeEngine:
    """A machine that reads 10 GB/s and multiplies 100 GFLOP/s, and an engine of which every command takes 1 s."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        products = SHAPES.prefill_products(64)
        self._answers: dict[str, Any] = {
            "read": 8 * QUICK_BUFFER_BYTES / 10e9,
            "copy": 8 * QUICK_BUFFER_BYTES / 5e9,
            "multiply": sum(product.flop for product in products) / 100e9,
            "decode": {"taken_s": 1.0, "context_lens": [[40, 41], [50, 51]]},
            "attend": 1.0,
            "prefill": {"taken_s": 1.0, "num_steps": 1},
        }

    def ask(self, command: str, **_: Any) -> Any:
        self.asked.append(command)
        return self._answers[command]


def measured(only: str) -> tuple[FakeEngine, EngineMeasurement]:
    engine = FakeEngine()
    settings = LimitsSettings(quick=True, only=only)
    return engine, EngineMeasurement(cast(Child, engine), settings, SHAPES, lambda _: None)


def test_decoding_counts_the_bytes_of_the_contexts_that_the_steps_really_had() -> None:
    engine, measurement = measured("decode_bw_ratio")
    found = measurement.ratios()
    num_bytes = 2 * 1_191_968_768 + (40 + 41 + 50 + 51) * 114_688
    assert [ratio.case for ratio in found] == ["batch 1, context 32", "batch 2, context 32"]
    assert found[0].value == pytest.approx(num_bytes / 10e9)
    assert engine.asked[:6] == ["read", "decode"] * 3


def test_attention_counts_the_bytes_of_the_kv_alone() -> None:
    _, measurement = measured("attn_ratio")
    assert measurement.ratios()[1].value == pytest.approx(2 * 32 * 114_688 / 10e9)


def test_a_prompt_is_compared_with_bare_products() -> None:
    engine, measurement = measured("prefill_flop_ratio")
    (found,) = measurement.ratios()
    flop = 880_803_840 * 64 + 114_688 * 64**2 + 2 * 151_936 * 1024
    assert found.value == pytest.approx(flop / 100e9)
    assert found.case == "64 tokens, chunks of 64"
    assert engine.asked == ["multiply", "prefill"] * 3


def test_ceilings_that_no_ratio_needed_are_measured_when_they_are_wanted() -> None:
    engine, measurement = measured("memcpy,attn_ratio,gemm")
    measurement.ratios()
    found = {ceiling.name: ceiling.value for ceiling in measurement.ceilings()}
    assert found == pytest.approx({"memcpy": 5.0, "read_stream": 10.0, "gemm": 100.0})
    assert engine.asked.count("copy") == 1 + QUICK.num_rounds


def test_no_engine_is_built_when_nothing_needs_it() -> None:
    said: list[str] = []
    assert engine_limits(LimitsSettings(only=",".join(SYSTEM_NAMES), quick=True), said.append) == ([], [])
    assert said == []


def test_a_real_engine_is_measured_and_its_process_ends() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    ceilings, ratios = engine_limits(LimitsSettings(only=",".join(ENGINE_NAMES), quick=True), lambda _: None)
    assert children.read_text() == before
    assert [ceiling.name for ceiling in ceilings] == ["memcpy", "read_stream", "gemm"]
    assert [(ratio.name, ratio.case) for ratio in ratios] == [
        ("decode_bw_ratio", "batch 1, context 32"),
        ("decode_bw_ratio", "batch 2, context 32"),
        ("attn_ratio", "batch 1, context 32"),
        ("attn_ratio", "batch 2, context 32"),
        ("prefill_flop_ratio", "64 tokens, chunks of 64"),
    ]
    assert all(ceiling.value > 0 for ceiling in ceilings)
    assert all(0 < ratio.low <= ratio.high for ratio in ratios)


def test_a_model_that_is_not_there_is_said_in_a_sentence() -> None:
    with pytest.raises(BatonError, match="/nowhere"):
        engine_limits(LimitsSettings(model="/nowhere", quick=True), lambda _: None)
