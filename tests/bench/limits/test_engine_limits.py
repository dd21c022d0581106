"""An engine measured against the machine, for real and small: in this process, and once in one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.bench.documents import LimitsDocument
from baton.bench.limits.command import engine_limits
from baton.bench.limits.engine_process import EngineLimits
from baton.bench.limits.result import NAMES, LimitsSettings
from baton.bench.targets.process import descendants
from baton.wire.errors import ContextLengthExceeded, RequestFailed
from tests.bench.report.samples import FACTS

CORE = min(os.sched_getaffinity(0))
SETTINGS = LimitsSettings(quick=True, cores=str(CORE), max_num_batched_tokens=16)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineLimits]:
    limits = EngineLimits(SETTINGS)
    yield limits
    limits.close()


def test_everything_is_measured_in_a_process_that_stays_on_its_cores() -> None:
    before = {process.pid for process in descendants(os.getpid())}
    said: list[str] = []
    cores: set[int] = set()

    def say(text: str) -> None:
        said.append(text)
        for process in descendants(os.getpid()):
            if process.pid not in before and len(said) > 1:  # it is ready
                with suppress(ProcessLookupError):  # it may have ended since
                    cores.update(os.sched_getaffinity(process.pid))

    found = LimitsDocument(FACTS)
    engine_limits(SETTINGS, found, say)
    names = [ceiling.name for ceiling in found.ceilings] + [ratio.name for ratio in found.ratios]
    assert set(names) == set(NAMES)
    assert {"decode_bw_ratio, batch 2, context 32", "prefill_flop_ratio"} <= set(said)
    assert cores == {CORE}


def test_ratios_say_their_case_and_leave_nothing_behind(engine: EngineLimits) -> None:
    for _ in range(2):  # a request that stayed would be in the way of the second
        decode = engine.decode_bw_ratio(batch=2, context=32)
        assert (decode["name"], decode["case"], decode["goal"]) == ("decode_bw_ratio", "batch 2, context 32", "1")
        assert 0 < decode["low"] <= decode["high"]
        assert "MB in" in decode["note"]
        assert engine.prefill_flop_ratio()["case"] == "64 tokens, chunks of 16"


def test_a_batch_that_does_not_fit_is_an_error_and_leaves_nothing(engine: EngineLimits) -> None:
    with pytest.raises(ContextLengthExceeded, match="1000000 tokens leave no room"):
        engine.decode_bw_ratio(batch=1, context=1_000_000)
    with pytest.raises(RequestFailed, match="a step held 64 of 65 requests"):
        engine.decode_bw_ratio(batch=65, context=8)
    assert engine.decode_bw_ratio(batch=1, context=32)["value"] > 0
