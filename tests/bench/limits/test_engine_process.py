from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from bench.child import Child
from wire.errors import RequestFailed

NUM_POOL_TOKENS = 256
SPEC: dict[str, Any] = {
    "model": "",
    "cores": sorted(os.sched_getaffinity(0))[:1],
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_pool_tokens": NUM_POOL_TOKENS,
    "num_product_rows": 16,
    "buffer_bytes": 2**18,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Child]:
    with Child("bench.limits.engine_process", SPEC) as child:
        child.hear()
        yield child


def test_each_step_computes_one_token_of_each_request(engine: Child) -> None:
    answer = engine.ask("decode", batch=3, context=20, num_steps=4)
    # the step before the first that is timed has computed token 21
    assert answer["context_lens"] == [[length] * 3 for length in (22, 23, 24, 25)]
    assert answer["taken_s"] > 0


def test_commands_leave_no_request_and_no_block(engine: Child) -> None:
    context = NUM_POOL_TOKENS * 3 // 4
    for _ in range(3):
        assert len(engine.ask("decode", batch=1, context=context, num_steps=1)["context_lens"]) == 1
        assert engine.ask("prefill", num_tokens=context)["taken_s"] > 0
        assert engine.ask("attend", batch=2, context=context, num_calls=2) > 0


def test_a_prompt_is_computed_each_time_and_not_found_in_the_cache(engine: Child) -> None:
    assert [engine.ask("prefill", num_tokens=96)["num_steps"] for _ in range(3)] == [6, 6, 6]  # chunks of 16


def test_a_batch_that_does_not_fit_is_an_error_and_leaves_nothing(engine: Child) -> None:
    with pytest.raises(RequestFailed, match="the engine has no room for 4 requests of 100 tokens"):
        engine.ask("decode", batch=4, context=100, num_steps=1)
    with pytest.raises(RequestFailed, match="a step held 4 of 5 requests"):
        engine.ask("decode", batch=5, context=8, num_steps=1)
    assert len(engine.ask("decode", batch=1, context=20, num_steps=1)["context_lens"]) == 1


def test_ceilings_take_time(engine: Child) -> None:
    assert engine.ask("multiply") > 0
    for command in ("read", "copy"):
        few_s, many_s = (engine.ask(command, num_passes=num_passes) for num_passes in (10, 2000))
        assert 0 < few_s < many_s


def test_it_stays_on_its_cores(engine: Child) -> None:
    assert os.sched_getaffinity(engine.pid) == set(SPEC["cores"])
