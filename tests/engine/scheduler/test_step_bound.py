"""Chunks of prompts beside streams keep to the goal between tokens, as long as first tokens are in time with that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import Request, SampledToken
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step_bound import FIRST_CHUNK, StepBound
from baton.engine.scheduler.step_costs import StepCosts, work_of
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import SMALLEST_CHUNK, StepCost

COST = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)
NUMBERS = count(1)
TPOT_S, TTFT_S, BUDGET = 0.012, 0.2, 512


def prompt(num_tokens: int, max_tokens: int = 100, tpot_s: float = 0.0, ttft_s: float = 0.0) -> Request:
    params = DecodingParams(temperature=0.0, max_tokens=max_tokens, goal_tpot_s=tpot_s, goal_ttft_s=ttft_s)
    number = next(NUMBERS)
    return Request(RequestKey.numbered(number), [number] * num_tokens, num_tokens, params, b"r", 4096)


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
        self.scheduler.apply(step, {each.key: SampledToken(9, None) for each in step.requests if each.needs_sample})
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
