"""Chunks of prompts beside streams keep to the goal between tokens, as long as first tokens are in time with that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import SampledToken
from baton.engine.scheduler.step_bound import FIRST_CHUNK, StepBound
from baton.engine.scheduler.step_costs import StepCosts, work_of
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import SMALLEST_CHUNK, StepCost

COST = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)
NUMBERS = count(1)
TPOT_S, TTFT_S, BUDGET = 0.012, 0.2, 512


def prompt(num_tokens: int, max_tokens: int = 100, tpot_s: float = 0.0, ttft_s: float = 0.0) -> Request:
    params = DecodingParams(temperature=0.0, max_tokens=max_tokens, goal_tpot_s=tpot_s, goal_ttft_s=ttft_s)
    number = next(NUMBERS)
    return Request(RequestKey.numbered(number), Prompt((number,) * num_tokens), params, b"r", 4096)


class Node:
    """A scheduler whose steps take what they cost. `ttft_s`: its goal for the first token, 0: none."""

    def __init__(self, ttft_s: float = 0.0, tpot_s: float = TPOT_S, cost: StepCost | None = COST) -> None:
        self.now_s = 0.0
        costs = StepCosts()
        costs.cost = cost
        bound = StepBound(costs, tpot_s, ttft_s, lambda: self.now_s)
        limits = SchedulerLimits(16, 64, BUDGET, 4096)
        self.scheduler = Scheduler(BlockPool(4096), limits, frozenset(), bound)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self, *, expects_streams: bool = False) -> tuple[int, float]:
        """Compute a step: tokens of prompts in it, and what it takes."""
        step = self.scheduler.schedule(expects_streams=expects_streams)
        self.scheduler.advance(step)
        work = work_of(step)
        self.now_s += COST.seconds(work)
        self.scheduler.apply(step, {each.key: (SampledToken(9, None),) for each in step.requests if each.needs_sample})
        return work.num_prompt_tokens, COST.seconds(work)

    def begin(self, num_streams: int, max_tokens: int = 100, tpot_s: float = 0.0) -> None:
        """Let so many requests begin to decode."""
        self.add(*(prompt(20, max_tokens, tpot_s) for _ in range(num_streams)))
        while self.step()[0]:
            pass

    def chunks(self) -> list[int]:
        """Compute all prompts: how many of their tokens are in each step."""
        found: list[int] = []
        while (num_tokens := self.step()[0]) or not found:
            found.append(num_tokens)
        return found


def longest_s(node: Node, prompts: Sequence[Request]) -> float:
    """The longest step in which these prompts are computed."""
    node.add(*prompts)
    longest = 0.0
    while any(request.num_computed_tokens < request.num_prompt_tokens for request in prompts):
        longest = max(longest, node.step()[1])
    return longest


def test_beside_a_stream_chunks_keep_to_the_goal() -> None:
    node = Node()
    node.begin(1)
    node.add(prompt(200))
    sizes = node.chunks()
    assert sum(sizes) in (199, 200)  # the last token alone counts as decoding
    assert all(40 <= size <= 60 for size in sizes[:-1])


def test_a_prompt_goes_on_however_little_time_there_is() -> None:
    node = Node(tpot_s=1e-6)
    node.begin(1)
    node.add(prompt(200))
    assert node.chunks()[0] == SMALLEST_CHUNK


def test_chunks_are_small_while_their_cost_is_not_known() -> None:
    node = Node(tpot_s=10.0, cost=None)
    node.begin(1)
    node.add(prompt(200))
    assert 0 < FIRST_CHUNK < 200
    assert node.chunks()[0] == FIRST_CHUNK


def test_a_step_stays_short_when_a_stream_may_join() -> None:
    node = Node(TTFT_S)
    node.add(prompt(1000))
    assert node.step()[0] == BUDGET
    assert node.step(expects_streams=True)[0] < 70


def test_a_step_that_a_goal_makes_short_is_filled_up_with_the_next_prompt() -> None:
    node = Node()
    node.add(prompt(80), prompt(80))
    (first, _), (second, _) = (node.step(expects_streams=True) for _ in range(2))
    assert first < 80
    assert abs(second - first) <= 2


def test_the_tightest_goal_of_the_requests_that_decode_bounds_the_step() -> None:
    sizes = []
    for goal_s in (0.004, 0.0, 0.03):
        node = Node()
        node.begin(1, tpot_s=goal_s)
        node.add(prompt(200))
        sizes.append(node.chunks()[0])
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_prompts_that_are_expected_in_time_cost_streams_nothing(num_prompts: int) -> None:
    node = Node(TTFT_S)
    node.begin(4)
    assert longest_s(node, [prompt(150) for _ in range(num_prompts)]) <= TPOT_S


def test_steps_become_longer_by_what_a_prompt_needs_to_be_in_time_and_no_more() -> None:
    """125 and 146 ms of prompts within 80 % of 200: with steps that keep to 12 they would take 165 and 194."""
    found = []
    for num_tokens in (300, 350, 1000):
        node = Node(TTFT_S)
        node.begin(16)
        waiting = [prompt(num_tokens) for _ in range(2)]
        found.append(longest_s(node, waiting[:1] if num_tokens == 1000 else waiting))
    assert TPOT_S < found[0] < found[1] < 0.09
    assert found[2] <= TPOT_S  # it takes longer than its goal even alone, so it can wait for who is in time


def test_short_answers_are_not_delayed_by_prompts_whose_time_they_cannot_spare() -> None:
    """146 ms of prompts, and of 20 tokens at 12 ms each 190 ms to spare, of 12 tokens 110."""
    for max_tokens, is_spared in ((20, True), (12, False)):
        node = Node(TTFT_S)
        node.begin(16, max_tokens)
        node.add(prompt(350), prompt(350))
        longest = max(node.step()[1] for _ in range(6))
        assert (longest > 2 * TPOT_S) == is_spared, longest


def test_without_a_goal_for_the_first_token_steps_always_keep_to_the_other() -> None:
    node = Node()
    node.begin(16)
    assert longest_s(node, [prompt(400, ttft_s=0.15) for _ in range(20)]) <= TPOT_S


def test_a_request_may_have_a_goal_of_its_own_for_its_first_token() -> None:
    longest = []
    for goal_s in (10.0, 0.0, 0.18):
        node = Node(TTFT_S)
        node.begin(16)
        longest.append(longest_s(node, [prompt(600, ttft_s=goal_s)]))
    assert longest == sorted(set(longest))


def test_late_prompts_wait_for_streams_in_time_and_not_for_streams_that_began_late() -> None:
    node = Node(TTFT_S)
    stream = prompt(20)
    node.add(stream)
    node.step()
    begun_s = node.now_s
    node.add(*(prompt(500) for _ in range(40)))  # together they take twenty times as long as their goal
    beside, behind = [], []
    while stream.key in node.scheduler.requests.running and len(stream.token_ids) < stream.most_tokens:
        beside.append(node.step()[1])
    assert (node.now_s - begun_s) / 99 <= TPOT_S
    node.scheduler.requests.remove(stream.key)
    while (found := node.step())[0]:
        behind.append(found[0])
    assert max(beside[:50]) <= TPOT_S  # what steps left of the goal until then is used up by the last ones
    assert min(behind[-10:-1]) > 0.9 * (BUDGET - 40)


def test_beyond_the_capacity_prompts_are_computed_as_if_there_were_no_goal_between_tokens() -> None:
    ends = []
    for ttft_s, tpot_s in ((TTFT_S, TPOT_S), (0.0, 10.0), (0.0, TPOT_S)):
        node = Node(ttft_s, tpot_s)
        crowd = [prompt(400, max_tokens=40) for _ in range(40)]
        node.add(*crowd)
        while any(request.num_computed_tokens < request.num_prompt_tokens for request in crowd):
            node.step()
        ends.append(node.now_s)
    goals, none, always = ends
    assert goals < 1.06 * none
    assert always > 1.12 * none


def firsts(node: Node, *arriving: Sequence[Request]) -> list[int]:
    """The numbers of the requests in the order of their first tokens; before each step the next ones arrive."""
    requests, found, waves = [each for wave in arriving for each in wave], list[int](), iter(arriving)
    while len(found) < len(requests):
        node.add(*next(waves, ()))
        node.step()
        found += [number for number, each in enumerate(requests) if number not in found and each.last_due_s is not None]
    return found


def test_a_short_prompt_does_not_wait_for_a_long_one_that_has_just_come() -> None:
    order = firsts(Node(2.0), [prompt(2000), prompt(100)], [prompt(1000), prompt(50)])
    assert order == [1, 3, 2, 0]


def test_a_prompt_that_has_waited_for_as_long_as_it_takes_is_overtaken_by_nobody() -> None:
    order = firsts(Node(2.0), [prompt(1400)], *([prompt(100)] for _ in range(40)))
    assert 0 < order.index(0) < 30


def test_costs_that_are_wrong_by_far_let_nobody_wait_for_longer_than_its_goal() -> None:
    wrong = StepCost(*(1000 * part for part in (1e-3, 2e-4, 5e-8, 1e-4, 2e-8)))
    order = firsts(Node(TTFT_S, cost=wrong), [prompt(2000)], *([prompt(100)] for _ in range(40)))
    assert order.index(0) < 20


def test_without_a_goal_for_the_first_token_prompts_are_computed_as_they_come() -> None:
    assert firsts(Node(), [prompt(2000), prompt(100), prompt(1000)]) == [0, 1, 2]


PLAIN = StepCost(0.01, 1e-3, 0.0, 1e-3, 0.0)
NOW_S = 100.0


def bound(cost: StepCost | None = PLAIN, ttft_s: float = 1.0, now_s: float = NOW_S) -> StepBound:
    """One that is asked at `now_s`, with a goal of 50 ms between tokens."""
    costs = StepCosts()
    costs.cost = cost
    return StepBound(costs, 0.05, ttft_s, lambda: now_s)


def stream(
    last_due_s: float | None = 1e6, *, num_left: int = 50, tpot_s: float = 0.0, first_due_s: float = 1e6
) -> Request:
    """A request that decodes and has so many tokens to go."""
    found = prompt(20, 100, tpot_s)
    found.most_tokens = 20 + num_left
    found.num_computed_tokens, found.last_due_s, found.first_due_s = 19, last_due_s, first_due_s
    return found


def due(num_tokens: int, left_s: float, num_computed: int = 0) -> Request:
    """A prompt whose first token is due in so many seconds."""
    found = prompt(num_tokens + num_computed)
    found.first_due_s, found.num_computed_tokens = NOW_S + left_s, num_computed
    return found


STREAMS = [stream() for _ in range(9)]
"""Beside one more a step takes 20 ms without prompts: 24 of 44 planned are left."""


@pytest.mark.parametrize(
    ("last", "prompts", "tokens"),
    [
        (stream(), [due(100, 10.0)], 24),
        (stream(tpot_s=0.045), [due(100, 10.0)], 19),
        (stream(tpot_s=0.02), [due(100, 10.0)], SMALLEST_CHUNK),
        (stream(), [due(100, 0.3245)], 81),  # within 124.5 ms: four parts of five
        (stream(), [due(50, 10.0), due(50, 0.3245)], 81),
        (stream(NOW_S + 50 * 0.0665), [due(200, 0.1), due(50, 0.511)], 81),  # the first is late, and the second not
        (stream(), [due(100, 0.25)], 2**31),  # nothing of its time is for others
        (stream(NOW_S + 50 * 0.0235), [due(100, 0.25)], 2**31),  # it has lost its goal already
        (stream(NOW_S + 50 * 0.046), [due(1300, 1.4)], 24),  # 1.3 s to spare
        (stream(NOW_S + 50 * 0.0465), [due(1320, 1.4)], 2**31),
        (stream(NOW_S + 50 * 0.0665), [due(2400, 2.5)], 38),  # what it needs on average is more than its goal
        (stream(NOW_S + 50 * 0.0665), [due(200, 0.1)], 38),
        (stream(NOW_S + 0.0665, num_left=1), [due(100, 0.25)], 38),
        (stream(NOW_S + 0.0665, num_left=0), [due(100, 0.25)], 38),
        (stream(None, num_left=1, tpot_s=0.0665), [due(100, 0.25)], 38),
    ],
)
def test_what_of_a_prompt_a_step_takes(last: Request, prompts: list[Request], tokens: int) -> None:
    assert bound().prompt_tokens([*STREAMS, last], prompts) == tokens


def test_a_chunk_is_as_long_as_the_place_of_the_first_prompt_allows() -> None:
    cost = replace(PLAIN, prompt_pair_s=2e-7)
    found = [bound(cost).prompt_tokens([stream()] * 10, [due(99, 9.0, first), due(99, 9.0, 400)]) for first in (0, 800)]
    assert found == [cost.chunk_within(0.024, first) for first in (0, 800)] == [23, 20]


def test_all_prompts_that_press_are_what_streams_have_to_spare() -> None:
    spares = stream(NOW_S + 50 * 0.046)  # 1.3 s
    for first, second in ((due(700, 0.75), due(700, 1.5)), (due(100, 0.15), due(1300, 1.55))):
        assert bound().prompt_tokens([*STREAMS, spares], [first, second]) == 24
        assert bound().prompt_tokens([*STREAMS, spares], [first]) > 24


def test_a_prompt_of_whose_time_nothing_is_left_to_plan_is_in_a_hurry() -> None:
    last = due(100, 0.0)
    last.first_due_s = (1.0 - 0.8) * 1.0
    assert bound(now_s=0.0).prompt_tokens([stream()], [last]) == 2**31


def test_of_prompts_without_a_known_cost_a_step_takes_a_few_tokens() -> None:
    for cost in (None, StepCost(0.01, 0.0, 0.0, 1e-3, 0.0)):
        assert bound(cost).prompt_tokens([stream()], [due(100, 10.0)]) == FIRST_CHUNK


@pytest.mark.parametrize(
    ("cost", "ttft_s", "due_s", "turn_s"),
    [
        (PLAIN, 1.0, 101.0, 100.2),
        (replace(PLAIN, prompt_pair_s=1e-5), 1.0, 101.0, 100.401),
        (PLAIN, 0.15, 100.15, 100.15),
        (None, 1.0, 101.0, 100.0),
        (PLAIN, 0.0, math.inf, 0.0),
    ],
)
def test_a_turn_comes_after_as_long_as_a_prompt_takes_or_its_goal(
    cost: StepCost | None, ttft_s: float, due_s: float, turn_s: float
) -> None:
    request = prompt(200)
    bound(cost, ttft_s).queued(request)
    assert (request.first_due_s, request.turn_s) == pytest.approx((due_s, turn_s))


def test_without_a_goal_for_first_tokens_none_is_due() -> None:
    request = prompt(200, ttft_s=0.1)
    StepBound(StepCosts(), 0.05).queued(request)
    assert (request.first_due_s, request.turn_s) == (math.inf, 0.0)


def test_last_tokens_are_due_by_the_goal_between_them_unless_the_first_was_late() -> None:
    late, in_time, own = stream(None, first_due_s=99.9), stream(None), stream(None, tpot_s=0.1)
    for each in (late, in_time, own):
        bound().begun(each)
    assert (late.last_due_s, in_time.last_due_s, own.last_due_s) == (-math.inf, 100.0 + 50 * 0.05, 100.0 + 50 * 0.1)
