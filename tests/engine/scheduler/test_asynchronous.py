"""Asynchronous scheduling: the same tokens as one step after the other, and no block released early."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.request import PENDING_TOKEN, Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken, Step
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.simulation import EOS, Device, Name, Simulation, continuation
from tests.request_keys import A, B, key_of

TOKEN = (SampledToken(7, None),)


def endless(max_tokens: int = 4, **others: Any) -> DecodingParams:
    return DecodingParams(max_tokens=max_tokens, ignore_eos=True, **others)


def new_scheduler(num_blocks: int = 16, budget: int = 16) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, SchedulerLimits(4, 8, budget, num_blocks * 4), frozenset({EOS})), pool


def request(key: RequestKey, num_tokens: int = 5, params: DecodingParams | None = None, *, first: int = 100) -> Request:
    prompt = Prompt.of(range(first, first + num_tokens))
    return Request(key, prompt, params or endless(), b"root", 64)


def launched(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    scheduler.advance(step)
    return step


def ahead(scheduler: Scheduler) -> Step:
    step = scheduler.schedule_ahead()
    assert step is not None
    scheduler.advance(step)
    return step


def shares(step: Step | None) -> list[tuple[object, int, int]]:
    assert step is not None
    return [(share.key, share.start, share.num_tokens) for share in step.requests]


# --- the next step while one is in flight


def test_the_step_ahead_computes_the_pending_token() -> None:
    scheduler, _ = new_scheduler()
    one = request(A)
    scheduler.add(one)
    first = launched(scheduler)
    assert one.token_ids[-1] == PENDING_TOKEN
    second = ahead(scheduler)
    assert shares(second) == [(A, 5, 1)]
    scheduler.apply(first, {A: TOKEN})
    assert one.token_ids[5:] == [7, PENDING_TOKEN]
    (output,) = scheduler.apply(second, {A: (SampledToken(9, None),)})
    assert one.token_ids[5:] == [7, 9]
    assert (output.output_index, output.num_computed_tokens, output.num_step_tokens) == (1, 6, 1)


def test_chunks_of_a_prompt_follow_each_other_ahead() -> None:
    scheduler, _ = new_scheduler(budget=4)
    scheduler.add(request(A, 10))
    steps = [launched(scheduler), ahead(scheduler)]
    assert [shares(step) for step in steps] == [[(A, 0, 4)], [(A, 4, 4)]]
    (output,) = scheduler.apply(steps[0], {})
    assert (output.num_computed_tokens, output.output_index, output.tokens) == (4, 0, ())
    assert shares(ahead(scheduler)) == [(A, 8, 2)]


def test_a_chunk_is_told_with_the_index_of_the_next_token_also_when_that_is_in_flight() -> None:
    scheduler, _ = new_scheduler(budget=4)
    scheduler.add(request(A, 6))
    chunk, rest = launched(scheduler), ahead(scheduler)
    assert [output.output_index for output in scheduler.apply(chunk, {})] == [0]
    assert [output.output_index for output in scheduler.apply(rest, {A: TOKEN})] == [0]


@pytest.mark.parametrize("is_first_token_only", [False, True])
def test_a_request_whose_pending_token_is_its_last_is_not_in_the_step_ahead(is_first_token_only: bool) -> None:
    scheduler, _ = new_scheduler()
    last = request(key_of("last"), params=endless(9 if is_first_token_only else 1))
    last.first_token_only = is_first_token_only
    scheduler.add(last)
    first = launched(scheduler)
    assert scheduler.schedule_ahead() is None
    scheduler.add(request(key_of("other"), first=200))
    assert shares(scheduler.schedule_ahead()) == [(key_of("other"), 0, 5)]
    (output,) = scheduler.apply(first, {key_of("last"): TOKEN})
    assert output.has_left


def test_a_request_at_the_end_of_its_context_is_not_in_the_step_ahead() -> None:
    scheduler, _ = new_scheduler()
    full = request(key_of("full"), params=DecodingParams(ignore_eos=True))
    full.most_tokens = 6
    scheduler.add(full)
    first = launched(scheduler)
    assert scheduler.schedule_ahead() is None
    (output,) = scheduler.apply(first, {key_of("full"): TOKEN})
    assert output.finish_reason == "length"


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_sampling_with_penalties_waits_for_the_values_and_nothing_waits_with_it(name: str) -> None:
    scheduler, _ = new_scheduler()
    scheduler.add(request(A, params=endless(4, **{name: 0.5})))
    scheduler.add(request(B, first=200))
    first = launched(scheduler)
    others = scheduler.schedule_ahead()
    assert others is not None
    assert shares(others) == [(B, 5, 1)]
    scheduler.advance(others)
    scheduler.apply(first, {A: TOKEN, B: TOKEN})
    assert shares(scheduler.schedule_ahead()) == [(A, 5, 1), (B, 6, 1)]


def test_a_last_token_with_penalties_does_not_delay_the_step_ahead() -> None:
    scheduler, _ = new_scheduler()
    scheduler.add(request(A, params=endless(1, presence_penalty=0.5)))
    scheduler.add(request(B, first=200))
    launched(scheduler)
    assert shares(scheduler.schedule_ahead()) == [(B, 5, 1)]


def test_what_needs_only_the_number_of_tokens_goes_ahead() -> None:
    params = DecodingParams(
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(3,),
        logit_bias_ids=(1,),
        logit_bias_values=(2.0,),
        logprobs=3,
        seed=1,
    )
    scheduler, _ = new_scheduler()
    scheduler.add(request(A, params=params))
    launched(scheduler)
    assert shares(scheduler.schedule_ahead()) == [(A, 5, 1)]


def test_room_that_needs_a_preemption_is_not_made_ahead() -> None:
    scheduler, pool = new_scheduler(num_blocks=4)
    old, young = request(key_of("old"), 7, endless(9)), request(key_of("young"), 7, endless(9), first=200)
    for one in (old, young):
        scheduler.add(one)
    first = launched(scheduler)  # 7 tokens and the one that is sampled: two full blocks each
    second = ahead(scheduler)
    scheduler.apply(first, {key_of("old"): TOKEN, key_of("young"): TOKEN})
    assert pool.num_available == 0
    assert scheduler.schedule_ahead() is None
    assert scheduler.num_preemptions == 0
    scheduler.apply(second, {key_of("old"): TOKEN, key_of("young"): TOKEN})
    assert shares(scheduler.schedule()) == [(key_of("old"), 8, 1)]
    assert scheduler.num_preemptions == 1


def test_a_request_in_a_step_in_flight_cannot_be_preempted() -> None:
    scheduler, _ = new_scheduler(num_blocks=2)
    scheduler.add(request(A, 7, endless(9)))
    launched(scheduler)
    step = ahead(scheduler)
    assert step.requests
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()


# --- results


def test_the_share_of_the_next_step_is_dropped_after_a_stop_token() -> None:
    scheduler, _ = new_scheduler()
    one = request(A, params=DecodingParams(max_tokens=9))
    scheduler.add(one)
    first, second = launched(scheduler), ahead(scheduler)
    (output,) = scheduler.apply(first, {A: (SampledToken(EOS, None),)})
    assert (output.finish_reason, output.has_left) == ("stop", True)
    assert scheduler.requests.remove(A) is one
    assert scheduler.apply(second, {A: TOKEN}) == []


def test_a_row_of_nan_leaves_though_the_next_step_was_launched() -> None:
    scheduler, _ = new_scheduler()
    scheduler.add(request(A))
    first, second = launched(scheduler), ahead(scheduler)
    (output,) = scheduler.apply(first, {})
    assert (output.has_failed, output.has_left, output.tokens) == (True, True, ())
    scheduler.requests.remove(A)
    assert scheduler.apply(second, {A: TOKEN}) == []


def test_the_result_of_an_old_step_does_not_reach_a_new_request_of_that_key() -> None:
    scheduler, _ = new_scheduler()
    scheduler.add(request(A))
    old = launched(scheduler)
    scheduler.requests.remove(A)
    new = request(A, 3, first=300)
    scheduler.add(new)
    step = launched(scheduler)
    assert scheduler.apply(old, {A: TOKEN}) == []
    assert new.token_ids[3:] == [PENDING_TOKEN]
    (output,) = scheduler.apply(step, {A: (SampledToken(9, None),)})
    assert (output.output_index, output.token_ids) == (0, [9])
    assert new.token_ids == [300, 301, 302, 9]


def test_blocks_are_published_when_their_step_is_applied_and_not_before() -> None:
    scheduler, pool = new_scheduler()
    scheduler.add(request(A, 7, endless(9)))
    steps = [launched(scheduler), ahead(scheduler)]
    assert pool.published_hashes() == []
    scheduler.apply(steps[0], {A: TOKEN})
    assert len(pool.published_hashes()) == 1, "the eighth token is known, its KV is not computed"
    scheduler.apply(steps[1], {A: TOKEN})
    assert len(pool.published_hashes()) == 2


def test_rewinding_leaves_requests_where_they_were() -> None:
    scheduler, _ = new_scheduler()
    scheduler.add(request(A, params=endless(9)))
    first = launched(scheduler)
    scheduler.apply(first, {A: TOKEN})
    scheduler.add(request(B, 6, first=200))
    steps = [launched(scheduler), ahead(scheduler)]
    scheduler.requests.remove(B)
    for step in reversed(steps):
        scheduler.rewind(step)
    one = scheduler.requests.get(A)
    assert one is not None
    assert (one.token_ids[5:], one.num_computed_tokens, one.num_pending_tokens) == ([7], 5, 0)
    assert one.num_steps_in_flight == 0
    assert scheduler.keys_of(steps[0]) == [A]
    assert shares(scheduler.schedule()) == [(A, 5, 1)]


# --- random traffic


@dataclass
class Traffic:
    """Requests in the order of their arrival, and what happens between them."""

    requests: list[tuple[int, list[int], DecodingParams]] = field(default_factory=list)
    handoffs: set[int] = field(default_factory=set)
    num_steps: list[int] = field(default_factory=list)
    aborted: dict[int, int] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)


def random_params(draw: random.Random, *, penalties: bool) -> DecodingParams:
    max_tokens = draw.choice((None, *range(1, 12)))
    return DecodingParams(
        max_tokens=max_tokens,
        min_tokens=draw.randrange((max_tokens or 10) + 1),
        ignore_eos=draw.random() < 0.3,
        stop_token_ids=tuple(draw.sample(range(50), draw.randrange(4))),
        presence_penalty=1.0 if penalties and draw.random() < 0.2 else 0.0,
    )


def random_traffic(draw: random.Random, limit: int, num_requests: int = 60) -> Traffic:
    traffic, penalties = Traffic(), draw.random() < 0.3
    bases = [[draw.randrange(50) for _ in range(limit)] for _ in range(3)]

    def prompt() -> list[int]:
        whole = draw.choice(bases)[: draw.randrange(1, limit)] + [draw.randrange(50)] * draw.randrange(2)
        return whole[: limit - 1]

    for key in range(num_requests):
        traffic.requests.append((key, prompt(), random_params(draw, penalties=penalties)))
        if draw.random() < 0.4:
            traffic.handoffs.add(key)
        traffic.num_steps.append(draw.randrange(6 if key // 20 % 2 else 24))  # a queue, and no queue, in turns
        if draw.random() < 0.25:
            victim = max(0, key - draw.randrange(4))
            traffic.aborted[key] = victim
            if draw.random() < 0.5:
                traffic.again[key] = prompt()
    return traffic


@dataclass
class Run:
    """One simulation of a traffic."""

    simulation: Simulation
    expected: dict[Name, tuple[list[int], str]] = field(default_factory=dict)
    num_delivered: int = 0

    def serve(self, traffic: Traffic) -> dict[Name, tuple[list[int], str]]:
        limit = self.simulation.limits.max_request_tokens
        granted: list[tuple[int, list[int], DecodingParams]] = []
        for (key, token_ids, params), num_steps in zip(traffic.requests, traffic.num_steps, strict=True):
            if key in traffic.handoffs and self._reserve(key, token_ids):
                granted.append((key, token_ids, params))
            else:
                self.simulation.add(key, token_ids, params)
                self.expected[key] = continuation(token_ids, params, limit)
            for _ in range(num_steps):
                self.simulation.step()
            if granted and len(granted) > key % 3:
                self._deliver(*granted.pop(0))
            if key in traffic.aborted:
                self._abort(traffic.aborted[key], traffic.again.get(key), params)
        for one in granted:
            self._deliver(*one)
        self.simulation.run()
        assert self.simulation.pool.num_held == 0
        return {key: (self.simulation.outputs[key], self.simulation.finished[key]) for key in self.expected}

    def _reserve(self, key: int, token_ids: list[int]) -> bool:
        """Rather just after a request has ended, whose blocks the step in flight may still write into."""
        for _ in range(8):
            if self.simulation.num_just_ended:
                break
            self.simulation.step()
        return self.simulation.reserve(key, token_ids)

    def _deliver(self, key: int, token_ids: list[int], params: DecodingParams) -> None:
        self.simulation.deliver(key, params)
        self.num_delivered += 1
        self.expected[key] = continuation(token_ids, params, self.simulation.limits.max_request_tokens)

    def _abort(self, key: int, prompt: Sequence[int] | None, params: DecodingParams) -> None:
        if key not in self.expected or key in self.simulation.finished:
            return
        self.simulation.abort(key)
        self.simulation.check_blocks()
        output, _ = self.expected.pop(key)
        assert self.simulation.outputs[key] == output[: len(self.simulation.outputs[key])]
        if prompt is not None:
            self.simulation.add(key, prompt, params)
            self.expected[key] = continuation(prompt, params, self.simulation.limits.max_request_tokens)


def simulate(
    seed: int,
    failure_rate: float,
    *,
    is_asynchronous: bool = False,
    num_stages: int = 1,
    proposer: Proposer | None = None,
) -> tuple[Run, Traffic]:
    """An engine and a traffic that depend on nothing but `seed`."""
    draw = random.Random(seed)
    block_size = draw.choice((2, 4))
    simulation = Simulation(
        num_blocks=draw.choice((8, 12, 40)),
        block_size=block_size,
        max_num_seqs=draw.choice((1, 3, 8)),
        budget=draw.choice((1, 5, 16, 64)),
        prefix_caching=draw.random() < 0.7,
        device=Device(block_size, is_asynchronous, random.Random(seed), failure_rate, num_stages),
        proposer=proposer,
    )
    return Run(simulation), random_traffic(draw, simulation.limits.max_request_tokens)


@pytest.mark.parametrize("failure_rate", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_has_the_same_tokens_asynchronously_and_one_step_after_the_other(
    seed: int, failure_rate: float
) -> None:
    plain, traffic = simulate(seed, failure_rate, is_asynchronous=False)
    ahead, _ = simulate(seed, failure_rate, is_asynchronous=True)
    one_by_one, asynchronous = plain.serve(traffic), ahead.serve(traffic)
    assert one_by_one == plain.expected
    assert asynchronous == ahead.expected
    untouched = (one_by_one.keys() & asynchronous.keys()) - set(traffic.aborted.values())
    assert len(untouched) > 30
    assert {key: one_by_one[key] for key in untouched} == {key: asynchronous[key] for key in untouched}
    assert plain.simulation.num_steps_ahead == 0
    assert ahead.simulation.num_steps_ahead > 20
    assert (ahead.simulation.num_failures > 0) == (failure_rate > 0)


@pytest.mark.parametrize(("seed", "num_stages"), [(0, 2), (1, 3), (3, 4)])
def test_random_traffic_has_the_same_tokens_in_several_stages(seed: int, num_stages: int) -> None:
    run, traffic = simulate(seed, 0.1, num_stages=num_stages)
    assert run.serve(traffic) == run.expected
    assert run.simulation.device.most_in_flight == num_stages
    assert run.simulation.num_rows_wasted == 0 or traffic.aborted


def test_stages_take_turns_with_the_requests_that_decode() -> None:
    simulation = Simulation(device=Device(4, num_stages=3))
    for name in range(7):
        simulation.add(name, [100 + name], endless(9))
    simulation.step()
    batches = [len(simulation.step().requests) for _ in range(12)]
    assert max(batches) == 3
    # in three steps each request has a token
    assert all(sum(batches[first : first + 3]) == 7 for first in range(3, 9))
    simulation.run()
    assert simulation.outputs[0] == continuation([100], endless(9), 99)[0]


def test_the_traffic_preempts_hands_over_and_overruns() -> None:
    """What the comparison above is worth: all of it happens."""
    num_preemptions = num_delivered = num_wasted = 0
    for seed in range(6):
        draw = random.Random(seed)
        simulation = Simulation(num_blocks=12, budget=16, device=Device(4, True, random.Random(seed)))
        run = Run(simulation)
        run.serve(random_traffic(draw, simulation.limits.max_request_tokens, 100))
        num_preemptions += simulation.scheduler.num_preemptions
        num_delivered += run.num_delivered
        num_wasted += simulation.num_rows_wasted
    assert num_preemptions > 20
    assert num_delivered > 30
    assert num_wasted > 50


def test_a_request_of_known_length_costs_no_row_more_when_asynchronous() -> None:
    counts = []
    for is_asynchronous in (False, True):
        simulation = Simulation(device=Device(4, is_asynchronous))
        simulation.add("a", range(100, 110), endless(12))
        simulation.run()
        assert simulation.outputs["a"] == continuation(range(100, 110), endless(12), 99)[0]
        counts.append(simulation.device.num_computed_tokens)
    assert counts[0] == counts[1] == 10 + 11


def test_a_stop_token_costs_one_row_whose_result_is_dropped() -> None:
    params = DecodingParams(max_tokens=40)
    answers = ((first, *continuation([first], params, 256)) for first in range(1000, 2000))
    first, expected = next((first, output) for first, output, reason in answers if reason == "stop" and len(output) > 3)
    simulation = Simulation(device=Device(4, is_asynchronous=True))
    simulation.add("a", [first], params)
    simulation.run()
    assert simulation.outputs["a"] == expected
    assert simulation.num_rows_wasted == 1
    assert simulation.device.num_computed_tokens == len(expected) + 1
