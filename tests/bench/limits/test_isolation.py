from __future__ import annotations

import asyncio

import pytest

from baton.bench.client.driver import Prompts
from baton.bench.client.endpoint import Endpoint, probe
from baton.bench.client.outcome import Outcome
from baton.bench.limits.served import IsolationSamples, Phases, StreamLoad, gaps_ms, isolation_ratio
from baton.wire.errors import RequestFailed
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script, Steady
from tests.bench.mock_server.server import MockServer, mock_server

NUM_PROMPT_TOKENS = 40
LOAD = StreamLoad(num_stream_tokens=20, prompts_per_s=50.0)


def stream(*chunk_s: float) -> Outcome:
    return Outcome(0, 0, "http://x", 0.0, chunk_s=list(chunk_s))


def samples(idle_p50_ms: list[float], loaded_p99_ms: list[float]) -> IsolationSamples:
    return IsolationSamples("one way", 512, LOAD, idle_p50_ms, loaded_p99_ms, [30.0], [80.0])


def phases() -> Phases:
    return Phases(Prompts(1000, seed=0), NUM_PROMPT_TOKENS, phase_s=0.2, max_stream_tokens=100)


async def endpoint(server: MockServer) -> Endpoint:
    return await probe(server.url, "completions", "", 5.0)


def test_the_gap_of_the_handoff_is_left_out() -> None:
    assert gaps_ms(stream(1.0, 1.5, 1.51, 1.53)) == pytest.approx([10.0, 20.0])


def test_a_stream_without_gaps_is_an_error() -> None:
    with pytest.raises(RequestFailed, match="fewer than three"):
        gaps_ms(stream(1.0, 1.1))


def test_isolation_is_the_slowest_gaps_over_those_of_a_stream_alone() -> None:
    found = isolation_ratio(samples([4.0, 4.1, 4.2], [8.2, 10.0, 8.0]))
    assert (found.name, found.case) == ("itl_isolation", "one way")
    assert found.value == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((8.0 / 4.2, 10.0 / 4.1))
    assert not found.noisy


def test_isolation_is_noisy_when_the_stream_alone_was_unsteady() -> None:
    assert isolation_ratio(samples([4.0, 6.0], [8.0, 8.0])).noisy


async def test_a_trial_finds_the_rate_that_keeps_a_prefill_node_half_busy() -> None:
    async with mock_server(Steady(ttft_s=0.05, itl_s=0.002)) as server:
        load = await phases().trial(await endpoint(server))
    assert 0 < load.prompts_per_s < 10  # a prompt takes 50 ms, and more where the machine has other work
    assert load.num_stream_tokens == 100  # as many as the model's context lets


async def test_prompts_come_beside_the_stream_and_stop_with_it() -> None:
    found = IsolationSamples("one way", NUM_PROMPT_TOKENS, LOAD)
    async with mock_server(Steady(ttft_s=0.002, itl_s=0.01)) as server:
        await phases().round(await endpoint(server), found)
        kinds = [record.body["max_tokens"] for record in server.records]
    assert kinds[0] == LOAD.num_stream_tokens  # alone
    assert kinds[1:].count(LOAD.num_stream_tokens) == 1
    assert kinds[1:].count(1) >= 1
    assert len(found.idle_p50_ms) == len(found.loaded_p99_ms) == 1
    assert found.idle_p50_ms[0] > 0
    assert found.loaded_max_ms[0] >= found.loaded_p99_ms[0]
    assert found.ttft_ms


class _NoPrompts:
    """Answers streams, refuses prompts."""

    def answer(self, number: int, num_output_tokens: int) -> Answer:
        """See `Schedule`."""
        fault = Fault(FaultKind.HTTP_ERROR) if num_output_tokens == 1 else None
        return Answer(ttft_s=0.002, gaps_s=(0.01,) * (num_output_tokens - 1), fault=fault)


async def test_a_prompt_that_fails_is_an_error() -> None:
    async with mock_server(_NoPrompts()) as server:
        target = await endpoint(server)
        with pytest.raises(RequestFailed, match="a request failed: http error"):
            await phases().round(target, IsolationSamples("one way", NUM_PROMPT_TOKENS, LOAD))


async def test_a_stream_that_fails_is_an_error_and_calls_the_prompts_off() -> None:
    async with mock_server(Script((Answer(0.002, (0.01,) * 4, fault=Fault(FaultKind.CUT, 3)),))) as server:
        target = await endpoint(server)
        with pytest.raises(RequestFailed, match="a request failed"):
            await phases().round(target, IsolationSamples("one way", NUM_PROMPT_TOKENS, LOAD))
    assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"prompts"})
