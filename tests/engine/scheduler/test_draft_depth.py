"""How many drafts: as many as make tokens come sooner, for all who decode, and never against a goal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.scheduler.draft_depth import DecodingStep, DraftDepth
from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import PLANNED_SHARE
from tests.engine.scheduler.proposers import Guessing
from tests.request_keys import key_of


class Costly(Guessing):
    """Drafts take time to make."""

    made = DraftCost(0.0, 0.0)
    free: RequestKey | None = None

    def cost(self, request: Request) -> DraftCost:
        return FREE if request.key == self.free else self.made


def depth_of(row_s: float, bound: StepBound | None = None, step_s: float = 0.04) -> DraftDepth:
    """Where a step takes `step_s` and `row_s` for each row."""
    costs = StepCosts()
    for _ in range(30):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            costs.rows.learn(rows, step_s + row_s * rows)
    return DraftDepth(costs, bound)


def request(name: str | int, num_tokens: int = 5, **params: Any) -> Request:
    wanted = DecodingParams(**{"max_tokens": 500, **params})
    return Request(key_of(name), Prompt.of(range(num_tokens)), wanted, b"", 1000)


def draft(count: int, confidence: float) -> Draft:
    return Draft(range(count), [confidence] * count, "ngram")


def counts(depth: DraftDepth, drafts: Sequence[Draft], num_others: int = 0, **params: Any) -> list[int]:
    requests = [request(number) for number in range(len(drafts))]
    others = [request(f"other{number}", **params) for number in range(num_others)]
    step = DecodingStep([*requests, *others], len(drafts) + num_others, 0.0)
    return depth.chosen(requests, drafts, step)


def test_one_stream_gets_all_that_are_likely_and_few_that_are_not() -> None:
    depth = depth_of(row_s=0.001)
    assert counts(depth, [draft(15, 0.95)]) == [15]
    assert 1 <= counts(depth, [draft(15, 0.5)])[0] <= 5
    assert counts(depth, [draft(15, 0.02)]) == [0]
    assert counts(depth, [NO_DRAFT]) == [0]


def test_the_more_streams_share_a_step_the_fewer_drafts_there_are() -> None:
    depth = depth_of(row_s=0.005)
    found = [counts(depth, [draft(15, 0.8)] * num_streams)[0] for num_streams in (1, 4, 16, 48)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0
    assert counts(depth, [draft(15, 0.9)], num_others=40) == [0]


def test_the_likeliest_drafts_come_first_whoever_has_them() -> None:
    sure, unsure = counts(depth_of(row_s=0.003), [draft(6, 0.95), draft(6, 0.4)])
    assert sure > unsure


def test_a_draft_never_makes_a_step_longer_than_the_goal_of_somebody_else() -> None:
    depth, drafts = depth_of(0.0005, StepBound(StepCosts(), 1.0)), [draft(15, 0.95)] * 2
    # 40 ms, and half a millisecond for each row, three of which are there anyway
    assert sum(counts(depth, drafts, 1, goal_tpot_s=0.0431 / PLANNED_SHARE)) == 3
    assert sum(counts(depth, drafts, goal_tpot_s=0.0431 / PLANNED_SHARE)) == 30


def test_drafts_of_others_slow_nobody_by_more_than_a_tenth() -> None:
    depth, drafts = depth_of(0.0005), [draft(15, 0.95)] * 2
    assert sum(counts(depth, drafts)) == 30
    for others in (1, 4):
        num_rows = 2 + others
        found = sum(counts(depth, [*drafts, draft(9, 0.01)], others - 1))
        assert found * 0.0005 == pytest.approx(0.1 * (0.04 + 0.0005 * num_rows), abs=0.0005)


def test_a_request_without_success_rests_longer_and_longer_and_is_tried_again() -> None:
    depth, asked = depth_of(0.001), request("a")
    step = DecodingStep([asked], 1, 0.0)
    tried = []
    for place in range(400):
        asked.token_ids.append(place)
        depth.planned()
        if not depth.is_resting(asked):
            (count,) = depth.chosen([asked], [draft(8, 0.6)], step)
            if count:
                tried.append(place)
                depth.verified(asked, draft(count, 0.6), 0)
    assert 2 <= len(tried) <= 60
    assert sum(1 for place in tried if place >= 200) <= 20
    assert any(place >= 100 for place in tried)


def test_where_no_draft_of_any_request_pays_nobody_is_asked_for_some_steps() -> None:
    depth = depth_of(row_s=0.02)
    waits = []
    for _ in range(5):
        assert counts(depth, [draft(8, 0.5)] * 8) == [0] * 8
        wait = 0
        while depth.is_resting(request("new")):
            depth.planned()
            wait += 1
        waits.append(wait)
    assert waits == sorted(waits)
    assert waits[-1] >= 8


@pytest.mark.parametrize(("made", "are_made"), [(DraftCost(0, 0.001), True), (DraftCost(0, 0.04), False)])
def test_drafts_that_cost_as_much_as_tokens_are_not_made(made: DraftCost, *, are_made: bool) -> None:
    depth, asked = depth_of(0.001), request("a")
    proposer = Costly(lambda request, count: (), 1.0)
    proposer.made = made
    found = depth.wanted([Wanted(asked, 8)], proposer, DecodingStep([asked], 1, 0.0))
    assert [1 <= each.max_tokens <= 8 and 0.0 < each.least_chance < 0.5 for each in found] == [True] * are_made


def test_what_it_takes_to_begin_has_to_pay_for_what_is_left_of_the_output() -> None:
    proposer = Costly(lambda request, count: (), 1.0)
    proposer.made = DraftCost(1.0, 0.001)
    for asked, are_made in ((request("long"), True), (request("short", max_tokens=10), False)):
        found = depth_of(0.001).wanted([Wanted(asked, 8)], proposer, DecodingStep([asked], 1, 0.0))
        assert bool(found) == are_made


def test_free_drafts_are_asked_for_whatever_they_may_be_worth() -> None:
    asked = request("a")
    wanted = [Wanted(asked, 8)]
    proposer = Guessing(lambda request, count: (), 1.0)
    assert proposer.cost(asked) == FREE
    assert depth_of(0.04).wanted(wanted, proposer, DecodingStep([asked], 1, 0.0)) == wanted


def test_a_model_that_does_not_pay_is_declined_for_longer_and_longer_and_text_goes_on() -> None:
    depth, asked = depth_of(0.001), request("a")
    proposer = Costly(lambda request, count: (), 1.0)
    proposer.made = DraftCost(0.0, 0.04)
    asked_at = []
    for place in range(200):
        asked.token_ids.append(place)
        if not depth.is_declined(asked):
            asked_at.append(place)
            assert not depth.wanted([Wanted(asked, 8)], proposer, DecodingStep([asked], 1, 0.0))
        assert not depth.is_resting(asked)
    assert asked_at[:5] == [0, 1, 3, 7, 15]
    assert depth.chosen([asked], [draft(8, 0.9)], DecodingStep([asked], 1, 0.0)) == [8]


def test_a_model_that_one_answer_has_ruled_out_is_tried_again_for_others() -> None:
    depth, poor = depth_of(0.001), request("poor")
    proposer = Costly(lambda request, count: (), 1.0)
    proposer.made = DraftCost(0.0, 0.02)
    for _ in range(40):
        depth.verified(poor, Draft(range(1), [0.5], proposer.method), 0)
    num_declined = 0
    while not depth.wanted([Wanted(asked := request(num_declined), 8)], proposer, DecodingStep([asked], 1, 0.0)):
        num_declined += 1
        assert num_declined < 50
    assert num_declined > 5


def test_free_drafts_of_some_are_left_whole_where_those_of_others_cost_time() -> None:
    depth, free, costly = depth_of(0.001), request("free"), request("costly")
    proposer = Costly(lambda request, count: (), 1.0)
    proposer.made, proposer.free = DraftCost(0.0, 0.001), free.key
    found = depth.wanted([Wanted(free, 16), Wanted(costly, 16)], proposer, DecodingStep([free, costly], 2, 0.0))
    assert found[0] == Wanted(free, 16)
    assert 1 <= found[1].max_tokens < 16
