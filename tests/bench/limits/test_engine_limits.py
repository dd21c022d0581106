"""An engine measured against the machine within one process, for real and small."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from bench.child import Child
from bench.limits.command import engine_limits
from bench.limits.result import Found
from bench.limits.settings import SYSTEM_NAMES, LimitsSettings
from wire.errors import RequestFailed

CORE = min(os.sched_getaffinity(0))
SETTINGS = LimitsSettings(quick=True, cores=str(CORE), max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def engine() -> Iterator[Child]:
    with Child("bench.limits.engine_process", asdict(SETTINGS)) as child:
        child.hear()
        yield child


def test_ratios_say_their_case_and_leave_nothing_behind(engine: Child) -> None:
    for _ in range(2):  # a request that stayed would be in the way of the second
        decode = engine.ask("decode_bw_ratio", batch=2, context=32)
        assert (decode["name"], decode["case"], decode["goal"]) == ("decode_bw_ratio", "batch 2, context 32", "1")
        assert 0 < decode["low"] <= decode["high"]
        assert "MB in" in decode["note"]
        assert engine.ask("attn_ratio", batch=2, context=32)["value"] > 0
        assert engine.ask("prefill_flop_ratio")["case"] == "64 tokens, chunks of 16"


def test_a_batch_that_does_not_fit_is_an_error_and_leaves_nothing(engine: Child) -> None:
    with pytest.raises(RequestFailed, match="1000000 tokens leave no room"):
        engine.ask("decode_bw_ratio", batch=1, context=1_000_000)
    with pytest.raises(RequestFailed, match="a step held 16 of 17 requests"):
        engine.ask("decode_bw_ratio", batch=17, context=8)
    assert engine.ask("decode_bw_ratio", batch=1, context=32)["value"] > 0


def test_ceilings_are_those_that_ratios_needed_and_those_that_are_wanted(engine: Child) -> None:
    engine.ask("attn_ratio", batch=1, context=32)
    engine.ask("prefill_flop_ratio")
    found = engine.ask("ceilings", names=["memcpy"])
    assert [(ceiling["name"], ceiling["unit"]) for ceiling in found] == [
        ("memcpy", "GB/s"),
        ("read_stream", "GB/s"),
        ("gemm", "GFLOP/s"),
    ]
    assert all(ceiling["value"] > 0 for ceiling in found)
    assert "4 MiB" in found[0]["note"]


def test_it_stays_on_its_cores(engine: Child) -> None:
    assert os.sched_getaffinity(engine.pid) == {CORE}


def test_no_engine_is_built_when_nothing_needs_it() -> None:
    said: list[str] = []
    found = Found()
    engine_limits(LimitsSettings(only=",".join(SYSTEM_NAMES), quick=True), found, said.append)
    assert (found, said) == (Found(), [])
