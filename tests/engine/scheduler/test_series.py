"""Steps of a series: they are those that the scheduler would choose, and their outputs those that it would find."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.request import PENDING_TOKEN, BlockCopy, Fork, Request
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.step import RequestOutput, SampledToken, Step
from baton.engine.scheduler.step_series import StepSeries, can_begin
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from baton.wire.tiers import TierTokens
from tests.engine.scheduler.simulation import Simulation
from tests.engine.scheduler.test_asynchronous import endless, simulate
from tests.engine.scheduler.test_matchers import FakeMatcher
from tests.request_keys import key_of


def watched(simulation: Simulation, *, has_series: bool = True) -> tuple[list[Step], list[RequestOutput]]:
    """The steps and the outputs of `simulation` from now on. Each step of a series is compared with what the scheduler
    chooses as it looks at every request; without `has_series` none goes on."""
    steps: list[Step] = []
    outputs: list[RequestOutput] = []
    step, note, check = simulation.step, simulation._note, simulation._check_step

    def stepped() -> Step:
        if not has_series:
            simulation.scheduler.requests.num_changes += 1
        return step()

    def noted(output: RequestOutput) -> None:
        outputs.append(output)
        note(output)

    def checked(step: Step) -> None:
        steps.append(step)
        if step.number:
            decoding, prompts = simulation.scheduler.requests.by_age()
            assert step.requests == tuple(request.share(1) for request in decoding)
            assert not prompts
            assert not simulation.scheduler.requests.num_waiting
        check(step)

    simulation.step, simulation._note, simulation._check_step = stepped, noted, checked  # type: ignore[method-assign]
    return steps, outputs


@pytest.mark.parametrize(("seed", "failure_rate"), [(1, 0.0), (2, 0.05), (3, 0.05), (4, 0.0), (6, 0.05), (7, 0.0)])
def test_random_traffic_has_the_same_outputs_with_series_and_without(seed: int, failure_rate: float) -> None:
    found = []
    for has_series in (True, False):
        run, traffic = simulate(seed, failure_rate)
        steps, outputs = watched(run.simulation, has_series=has_series)
        assert run.serve(traffic) == run.expected
        assert any(step.number for step in steps) == has_series
        found.append(([step.requests for step in steps], outputs, run.simulation.num_failures))
    assert found[0] == found[1]


def decoding(num_requests: int = 3, num_blocks: int = 64) -> tuple[Simulation, list[Step]]:
    simulation = Simulation(block_size=4, num_blocks=num_blocks)
    for name in range(num_requests):
        simulation.add(name, list(range(10 * name, 10 * name + 3 + name)), endless(20))
    steps, _ = watched(simulation)
    while len(steps) < 3 or not steps[-1].number:
        simulation.step()
    return simulation, steps


def numbers(steps: list[Step]) -> list[int]:
    return [step.number for step in steps]


def test_a_series_goes_on_until_a_request_ends() -> None:
    simulation, steps = decoding()
    first = steps[-1].series
    simulation.run()
    assert numbers([step for step in steps if step.series is first]) == list(range(19))
    assert steps[-1].series is first


def test_a_new_request_an_abort_and_a_step_that_fails_end_a_series() -> None:
    simulation, steps = decoding()

    def fail() -> None:
        simulation.device.failure_rate = 1.0
        simulation.step()

    def add() -> None:
        simulation.add("new", [7, 7], endless(40))

    for disturb in (add, lambda: simulation.abort(1), fail):
        last = steps[-1].series
        disturb()
        simulation.device.failure_rate = 0.0
        simulation.step()
        simulation.step()
        assert steps[-1].series is not last
        simulation.step()
        assert steps[-1].number


def test_without_a_block_for_the_next_token_requests_are_preempted_as_ever() -> None:
    simulation, steps = decoding(2, num_blocks=6)
    simulation.run()
    assert simulation.scheduler.num_preemptions
    assert max(numbers(steps)) > 4


def test_a_stop_token_that_is_no_end_yet_ends_no_series() -> None:
    simulation = Simulation()
    # every token is among those at which the request may end, but not before the last
    params = DecodingParams(max_tokens=12, min_tokens=12, stop_token_ids=tuple(range(50)))
    simulation.add("a", [1, 2, 3], params)
    steps, outputs = watched(simulation)
    simulation.run()
    assert numbers(steps) == [0, *range(11)]
    assert [output.finish_reason for output in outputs] == [*[""] * 11, "stop"]


def asked(name: str, arrival: int, num_tokens: int = 6, **members: Any) -> Request:
    """A request whose last token is to be computed, and that has one more to go than it may have to decode."""
    params = DecodingParams(**{"max_tokens": 9, **members.pop("params", {})})
    tokens = range(num_tokens)
    prompt, output_ids = Prompt.of(tokens[:5]), tokens[5:]
    found = Request(key_of(name), prompt, params, b"", 99, output_ids, arrival=arrival, **members)
    found.num_computed_tokens = num_tokens - 1
    return found


def begins(*requests: Request, count: int = 1) -> bool:
    return can_begin([request.share(count) for request in requests], requests)


def test_a_series_begins_where_each_request_decodes_and_only_its_tokens_can_end_it() -> None:
    assert begins(asked("a", 1), asked("b", 2))
    assert not begins()
    assert not begins(asked("b", 2), asked("a", 1))
    assert not begins(asked("a", 1), asked("b", 1))
    chunk = asked("a", 1)
    chunk.num_computed_tokens = 3
    assert not begins(chunk), "there is another token to compute"
    assert not begins(chunk, count=3)
    for change in (
        {"forks": (Fork(key_of("c"), DecodingParams()),)},
        {"block_copy": BlockCopy(1, 2)},
        {"first_token_only": True},
        {"matcher": forcing()},
    ):
        assert not begins(asked("a", 1, **change)), change
        assert not begins(asked("a", 1), asked("b", 2, **change)), change
    assert begins(asked("a", 1, matcher=FakeMatcher()))


def forcing() -> FakeMatcher:
    matcher = FakeMatcher(length=99)
    matcher.forced = [30]
    return matcher


def series_of(*requests: Request, num_blocks: int = 16) -> tuple[StepSeries, RequestBlocks]:
    """A series over requests that have their blocks, its first step launched."""
    blocks = RequestBlocks(BlockPool(num_blocks), 4, has_states=False)
    for request in requests:
        computed, cached = request.num_computed_tokens, request.num_cached_tokens
        assert blocks.take_for(request)
        request.num_computed_tokens, request.num_cached_tokens = computed, cached
        blocks.publish(request, computed)
    series = StepSeries(tuple(request.share(1) for request in requests), requests, blocks, frozenset({60}), 7)
    series.advance()
    return series, blocks


def sampled(series: StepSeries, *token_ids: int) -> list[RequestOutput] | None:
    keys = [share.key for share in series.first_step().shares]
    return series.apply({key: (SampledToken(token, None),) for key, token in zip(keys, token_ids, strict=True)})


def test_steps_of_a_series_and_their_outputs_are_each_a_token_further() -> None:
    one, other = asked("a", 1, 6), asked("b", 2, 8)
    other.num_cached_tokens, other.tiers = 3, (TierTokens("host", 2),)
    series, _ = series_of(one, other)
    assert (series.num_changes, series.is_applied) == (7, False)
    first = series.first_step()
    assert (first.number, first.context, first.series, first.spans) == (0, 5 + 7, series, ())
    for number in range(4):
        if number:
            step = series.next_step()
            assert step is not None
            assert (step.number, step.context, step.shares) == (number, 12 + 2 * number, first.shares)
            assert not series.is_applied
            series.advance()
        for request, num_tokens in ((one, 7), (other, 9)):
            assert (request.num_pending_tokens, request.num_steps_in_flight) == (1, 1)
            assert (len(request.token_ids), request.token_ids[-1]) == (num_tokens + number, PENDING_TOKEN)
            assert request.num_computed_tokens == num_tokens - 1 + number
        tokens = (SampledToken(20 + number, None),)
        assert sampled(series, 20 + number, 20 + number) == [
            RequestOutput(one.key, 1, 6 + number, 0, 1 + number, tokens, "", False, False),
            RequestOutput(other.key, 1, 8 + number, 3, 3 + number, tokens, "", False, False, tiers=other.tiers),
        ]
        assert series.is_applied
        assert (one.num_pending_tokens, one.num_steps_in_flight, one.token_ids[-1]) == (0, 0, 20 + number)
        assert (one.num_published_blocks, other.num_published_blocks) == ((6 + number) // 4, (8 + number) // 4)


def test_a_series_takes_a_block_when_one_is_full_and_ends_where_there_is_none() -> None:
    for num_blocks, goes_on in ((3, True), (2, False)):
        request = asked("a", 1, 7)
        series, blocks = series_of(request, num_blocks=num_blocks)
        assert sampled(series, 20) is not None
        assert series.next_step() is not None, "the last slot"
        series.advance()
        assert sampled(series, 20) is not None
        step = series.next_step()
        assert (step is not None) is goes_on
        assert (len(request.block_table), blocks.num_available) == ((3, 0) if goes_on else (2, 0))


@pytest.mark.parametrize(
    ("members", "token", "goes_on"),
    [
        ({}, 20, True),
        ({}, 60, False),
        ({"params": {"ignore_eos": True}}, 60, True),
        ({"params": {"stop_token_ids": (20, 21), "ignore_eos": True}}, 21, False),
        ({"params": {"max_tokens": 3}}, 20, True),
        ({"params": {"max_tokens": 2}}, 20, False),
        ({"matcher": FakeMatcher(length=9)}, 20, True),
        ({"matcher": FakeMatcher(length=1)}, 20, False),
    ],
)
def test_where_a_request_may_end_nothing_has_changed(members: dict[str, Any], token: int, goes_on: bool) -> None:
    request = asked("a", 1, **members)
    matcher = request.matcher
    series, _ = series_of(request, asked("b", 2, params={"ignore_eos": True}))
    assert (sampled(series, token, 20) is not None) is goes_on
    assert request.token_ids[-1] == (token if goes_on else PENDING_TOKEN)
    if isinstance(matcher, FakeMatcher):
        assert matcher.output == ([token] if goes_on else [])
        assert series.is_applied is goes_on


def test_a_token_that_is_missing_is_no_matter_of_a_series() -> None:
    request = asked("a", 1)
    series, _ = series_of(request, asked("b", 2))
    assert series.apply({request.key: (SampledToken(20, None),)}) is None
    assert request.token_ids[-1] == PENDING_TOKEN
