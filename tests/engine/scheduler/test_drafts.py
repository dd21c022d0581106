"""Drafts: whatever a proposer says, the tokens are those of decoding without it, and nobody else is worse off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.drafts import Speculation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import FREE, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import PENDING_TOKEN, Fork, Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, Step
from baton.wire.drafts import DraftsOfMethod
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.proposers import Guessing, liar, oracle
from tests.engine.scheduler.simulation import Device, Simulation, continuation, next_token
from tests.engine.scheduler.test_asynchronous import endless, simulate
from tests.engine.scheduler.test_matchers import FakeMatcher
from tests.request_keys import A, B, C, key_of

EOS = 60


def following(request: Request, count: int) -> list[int]:
    """What the simulated model samples next."""
    token_ids = list(request.token_ids)
    for _ in range(count):
        token_ids.append(next_token(token_ids, request.params.choice))
    return token_ids[len(request.token_ids) :]


# --- whole engines over a device that notices KV which is not where it should be


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize(
    ("seed", "share_right", "failure_rate"),
    [(3, 0.0, 0.1), (3, 1.0, 0.0), (3, 0.7, 0.1), (8, 0.7, 0.0), (9, 0.7, 0.1), (11, 0.0, 0.0), (11, 1.0, 0.1)],
)
def test_random_traffic_has_the_same_tokens_with_drafts_right_and_wrong(
    seed: int, share_right: float, failure_rate: float, *, is_asynchronous: bool
) -> None:
    proposer = Guessing(following, share_right, random.Random(seed), follows_some=seed % 2 == 0)
    run, traffic = simulate(seed, failure_rate, is_asynchronous=is_asynchronous, proposer=proposer)
    assert run.serve(traffic) == run.expected
    assert proposer.num_drafts > 10
    assert (proposer.num_accepted > 0) == (share_right > 0)


@pytest.mark.parametrize(("seed", "num_stages"), [(3, 2), (8, 3), (11, 4)])
def test_random_traffic_has_the_same_tokens_with_drafts_in_several_stages(seed: int, num_stages: int) -> None:
    proposer = Guessing(following, 0.7)
    run, traffic = simulate(seed, 0.1, num_stages=num_stages, proposer=proposer)
    assert run.serve(traffic) == run.expected
    assert proposer.num_accepted


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_is_handed_over_is_the_kv_of_tokens_and_never_that_of_drafts(share_right: float, *, goes_on: bool) -> None:
    proposer = Guessing(following, share_right)
    for num_steps in range(2, 9):
        simulation = Simulation(block_size=4, device=Device(4, is_asynchronous=True), proposer=proposer)
        simulation.add("a", [1, 2, 3], endless(60))
        for _ in range(num_steps):
            simulation.step()
        handed = simulation.core.handoffs.hand_over(key_of("a"), key_of("held"), goes_on=goes_on)
        if handed is None:
            assert goes_on, "it has less than a block"
            continue
        simulation.core.check()
        token_ids = [1, 2, 3, *simulation.outputs["a"]]
        known = [*handed.prompt.token_ids, *handed.output_ids, handed.next_token_id]
        assert known == token_ids[: handed.num_tokens + 1]
        assert len(handed.block_table) == -(-handed.num_tokens // 4)
        for place in range(handed.num_tokens):
            slot = (handed.block_table[place // 4], place % 4)
            assert simulation.device.slots[slot] == hash(tuple(token_ids[: place + 1]))
        simulation.core.handoffs.release(key_of("held"))
        if goes_on:
            simulation.run()
            assert simulation.outputs["a"] == continuation([1, 2, 3], endless(60), 256)[0]


def num_steps_of(proposer: Guessing | None, **settings: Any) -> int:
    simulation = Simulation(proposer=proposer, **settings)
    simulation.add("a", [1, 2, 3], endless(40))
    num_steps = 0
    while simulation.core.has_work:
        simulation.step()
        num_steps += 1
    assert simulation.outputs["a"] == continuation([1, 2, 3], endless(40), 256)[0]
    return num_steps


def test_right_drafts_save_steps_and_wrong_ones_take_none() -> None:
    assert num_steps_of(None) == num_steps_of(liar(following)) == 40
    # at most seven rows are free beside its own
    assert 40 // 8 <= num_steps_of(oracle(following)) <= 20


def test_the_blocks_of_wrong_drafts_are_free_again_and_are_not_found_by_others() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, proposer=liar(following))
    simulation.add("a", [1, 2, 3], endless(30))
    while simulation.core.has_work:
        simulation.step()
        num_tokens = 3 + len(simulation.outputs["a"])
        assert simulation.pool.num_held <= -(-num_tokens // 4)
    assert simulation.pool.num_cached == (3 + 29) // 4


def test_drafts_take_blocks_that_are_left_and_preempt_nobody() -> None:
    counts = []
    for proposer in (None, liar(following)):
        simulation = Simulation(num_blocks=12, block_size=4, prefix_caching=False, proposer=proposer)
        for name in range(4):
            simulation.add(name, [name] * 3, endless(8))
        simulation.run()
        counts.append(simulation.scheduler.num_preemptions)
    assert counts == [0, 0]


# --- one scheduler


class Scripted:
    """Proposes what it is told to, to requests that it is told of."""

    def __init__(self, *drafts: int, followed: Sequence[RequestKey] = (A, B, C)) -> None:
        self.drafts, self.followed = drafts, followed
        self.asked: list[tuple[RequestKey, int]] = []
        self.told: list[tuple[RequestKey, int, int]] = []
        self.forgotten: list[RequestKey] = []

    def follows(self, request: Request) -> bool:
        return request.key in self.followed

    method = "script"
    stores_kv = False

    def cost(self, request: Request) -> DraftCost:
        return FREE

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        self.asked += [(each.request.key, each.max_tokens) for each in wanted]
        return [Draft(self.drafts, [0.5] * len(self.drafts), self.method)] * len(wanted)

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        self.told.append((request.key, len(draft.token_ids), num_accepted))

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.key)


def new_scheduler(
    proposer: Scripted, num_blocks: int = 32, max_num_seqs: int = 8, budget: int = 16, max_num_drafts: int = 99
) -> Scheduler:
    limits = SchedulerLimits(4, max_num_seqs, budget, 64, vocab_size=100, max_num_drafts=max_num_drafts)
    return Scheduler(BlockPool(num_blocks), limits, frozenset({EOS}), speculation=Speculation(proposer))


def request(key: RequestKey, num_tokens: int = 5, **params: Any) -> Request:
    return Request(key, Prompt.of(range(num_tokens)), DecodingParams(**{"max_tokens": 50, **params}), b"", 64)


def stepped(scheduler: Scheduler, *token_ids: int) -> tuple[Step, list[RequestOutput]]:
    """A step in which each row of each request samples the next of `token_ids`, the last of them again and again."""
    step = scheduler.schedule()
    scheduler.advance(step)
    return step, applied(scheduler, step, *token_ids)


def applied(scheduler: Scheduler, step: Step, *token_ids: int) -> list[RequestOutput]:
    sampled = {}
    for share in step.requests:
        if share.needs_sample:
            tokens = [token_ids[min(row, len(token_ids) - 1)] for row in range(share.num_drafts + 1)]
            sampled[share.key] = tuple(SampledToken(token_id, None) for token_id in tokens)
            sampled |= {fork.key: sampled[share.key] for fork in share.forks}
    return scheduler.apply(step, sampled)


def decoding(scheduler: Scheduler, *requests: Request) -> None:
    """Have their prompts computed; each has sampled token 7."""
    for each in requests:
        scheduler.add(each)
    _, outputs = stepped(scheduler, 7)
    assert {output.key for output in outputs} >= {each.key for each in requests}


@pytest.mark.parametrize(
    ("sampled", "taken", "num_accepted"),
    [
        ((11, 12, 13, 14), [11, 12, 13, 14], 3),
        ((11, 12, 9, 14), [11, 12, 9], 2),
        ((11, 9, 13, 14), [11, 9], 1),
        ((9, 12, 13, 14), [9], 0),
        ((15, 12, 13, 14), [15], 0),
    ],
)
def test_drafts_are_taken_up_to_the_first_that_is_not_sampled(
    sampled: tuple[int, ...], taken: list[int], num_accepted: int
) -> None:
    scripted = Scripted(11, 12, 13)
    scheduler, asked = new_scheduler(scripted), request(A)
    decoding(scheduler, asked)
    step, (output,) = stepped(scheduler, *sampled)
    (share,) = step.requests
    assert (share.start, share.num_tokens, share.num_drafts) == (5, 4, 3)
    assert list(share.token_ids) == [*range(5), 7, 11, 12, 13]
    assert [list(row.token_ids) for row in share.rows()] == [[*range(5), 7, 11, 12, 13][:n] for n in (6, 7, 8, 9)]
    assert (output.output_index, output.token_ids, output.num_forced, output.num_step_tokens) == (1, taken, 0, 4)
    assert asked.token_ids == [*range(5), 7, *taken]
    assert output.num_computed_tokens == asked.num_computed_tokens == 5 + len(taken)
    assert (asked.num_pending_tokens, asked.num_steps_in_flight, asked.has_drafts) == (0, 0, False)
    assert len(asked.block_table) == -(-len(asked.token_ids) // 4)
    assert asked.num_published_blocks == asked.num_computed_tokens // 4
    assert scripted.told == [(A, 3, num_accepted)]
    step, _ = stepped(scheduler, 9)
    assert step.requests[0].start == 5 + len(taken)


def test_a_place_without_a_number_ends_what_is_taken_and_the_first_one_ends_the_request() -> None:
    for num_valid, taken in ((3, [11, 12, 13]), (2, [11, 12]), (1, [11]), (0, [])):
        scheduler, asked = new_scheduler(Scripted(11, 12, 13)), request(A)
        decoding(scheduler, asked)
        step = scheduler.schedule()
        scheduler.advance(step)
        valid = tuple(SampledToken(token_id, None) for token_id in (11, 12, 13, 14)[:num_valid])
        (output,) = scheduler.apply(step, {A: valid} if valid else {})
        assert (output.token_ids, output.has_failed, output.has_left) == (taken, not valid, not valid)
        if valid:
            assert asked.num_computed_tokens == len(asked.token_ids) - 1 == 5 + num_valid


@pytest.mark.parametrize(
    ("params", "drafts", "taken", "reason"),
    [
        ({}, (11, EOS, 13), [11, EOS], "stop"),
        ({"ignore_eos": True}, (11, EOS, 13), [11, EOS, 13, 99], ""),
        ({"stop_token_ids": (11,)}, (11, 12, 13), [11], "stop"),
        ({"min_tokens": 4}, (11, EOS, 13), [11, EOS, 13, 99], ""),
        ({"min_tokens": 3}, (11, EOS, 13), [11, EOS], "stop"),
        ({"max_tokens": 4}, (11, 12, 13), [11, 12, 99], "length"),
        ({"max_tokens": 2}, (11, 12, 13), [99], "length"),
    ],
)
def test_an_end_among_drafts_is_the_end(
    params: dict[str, Any], drafts: tuple[int, ...], taken: list[int], reason: str
) -> None:
    scheduler = new_scheduler(Scripted(*drafts))
    asked = request(A, **params)
    decoding(scheduler, asked)
    step = scheduler.schedule()
    scheduler.advance(step)
    num_drafts = step.requests[0].num_drafts
    (output,) = applied(scheduler, step, *drafts[:num_drafts], 99)
    assert (output.token_ids, output.finish_reason, output.has_left) == (taken, reason, bool(reason))


def test_drafts_are_as_many_as_there_are_rows_tokens_of_the_budget_places_and_blocks() -> None:
    many = range(70, 99)
    for settings, at_most in (
        ({}, 7),
        ({"max_num_seqs": 4}, 3),
        ({"max_num_seqs": 1}, 0),
        ({"budget": 5}, 5),
        ({"num_blocks": 2}, 2),
        ({"num_blocks": 3}, 6),
        ({"max_num_drafts": 3}, 3),
    ):
        scripted = Scripted(*many)
        scheduler, asked = new_scheduler(scripted, **settings), request(A)
        decoding(scheduler, asked)
        step = scheduler.schedule()
        assert step.requests[0].num_drafts == at_most, settings
        assert scripted.asked == [(A, at_most)] * bool(at_most)


def test_drafts_have_what_prompts_and_older_requests_leave() -> None:
    scheduler = new_scheduler(Scripted(*range(70, 74)), budget=16)
    decoding(scheduler, request(A), request(B), request(C))
    step, _ = stepped(scheduler, 9)
    # five rows are free
    assert [(share.key, share.num_drafts) for share in step.requests] == [(A, 4), (B, 1), (C, 0)]
    scheduler.add(replace(request(key_of("long")), prompt=Prompt.of(range(80, 95))))
    step, _ = stepped(scheduler, 9)
    assert [(share.num_tokens, share.num_drafts) for share in step.requests] == [(2, 1), (1, 0), (1, 0), (15, 0)]


def test_an_id_that_no_token_has_ends_the_drafts() -> None:
    for drafts, num_drafts in (((11, 100, 12), 1), ((11, 12, -1), 2), ((100,), 0)):
        scheduler = new_scheduler(Scripted(*drafts))
        decoding(scheduler, request(A))
        assert scheduler.schedule().requests[0].num_drafts == num_drafts


def test_who_cannot_be_verified_gets_no_drafts() -> None:
    scripted = Scripted(11)
    scheduler = new_scheduler(scripted)
    decoding(scheduler, request(A))
    scheduler.add(replace(request(C, 1), forks=(Fork(key_of("fork"), DecodingParams()),)))
    scheduler.add(replace(request(key_of("first"), 1), first_token_only=True))
    scripted.followed = (A, C, key_of("first"), key_of("fork"))
    step = scheduler.schedule()
    assert {share.key: share.num_drafts for share in step.requests} == {A: 1, C: 0, key_of("first"): 0}


@pytest.mark.parametrize(
    ("refused", "length", "num_drafts"), [(99, 99, 3), (13, 99, 2), (11, 99, 0), (99, 4, 2), (99, 2, 0)]
)
def test_drafts_end_where_the_grammar_refuses_one_or_nothing_can_follow(
    refused: int, length: int, num_drafts: int
) -> None:
    matcher = FakeMatcher(length)
    matcher.refused = refused
    scheduler, asked = new_scheduler(Scripted(11, 12, 13)), replace(request(A), matcher=matcher)
    decoding(scheduler, asked)
    step = scheduler.schedule()
    scheduler.advance(step)
    first, *behind = [row.matcher for row in step.requests[0].rows()]
    assert first is matcher
    outputs = [[7, 11], [7, 11, 12], [7, 11, 12, 13]]
    assert [vars(place)["output"] for place in behind] == outputs[:num_drafts]
    applied(scheduler, step, 11, 12, 9)
    assert matcher.output == [7, 11, 12, 9][: num_drafts + 2]


def test_forced_tokens_have_drafts_behind_them() -> None:
    matcher = FakeMatcher(length=99)
    scheduler, asked = new_scheduler(Scripted(11, 12)), replace(request(A), matcher=matcher)
    matcher.forced = [50, 51]
    decoding(scheduler, asked)
    assert asked.token_ids[5:] == [7, 50, 51]
    step, (output,) = stepped(scheduler, 11, 9)
    (share,) = step.requests
    assert (share.start, share.num_tokens, share.num_drafts) == (5, 5, 2)
    assert (output.token_ids, asked.num_computed_tokens) == ([11, 9], 9)


def test_a_request_that_is_followed_waits_for_its_token_and_others_do_not() -> None:
    scripted = Scripted(11, 12, followed=(A,))
    scheduler = new_scheduler(scripted)
    decoding(scheduler, request(A), request(B))
    first = scheduler.schedule()
    scheduler.advance(first)
    assert [(share.key, share.num_drafts) for share in first.requests] == [(A, 2), (B, 0)]
    scripted.followed = ()  # what is in flight has drafts all the same
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    scheduler.advance(ahead)
    assert [share.key for share in ahead.requests] == [B]
    assert ahead.requests[0].token_ids[-1] == PENDING_TOKEN
    applied(scheduler, first, 11, 9)
    again = scheduler.schedule_ahead()
    assert again is not None
    assert [(share.key, share.start) for share in again.requests] == [(A, 7), (B, 7)]


def test_drafts_of_a_step_that_failed_leave_nothing_behind() -> None:
    scheduler, asked = new_scheduler(Scripted(*range(70, 77))), request(A)
    decoding(scheduler, asked)
    step = scheduler.schedule()
    scheduler.advance(step)
    assert len(asked.block_table) == 4
    scheduler.rewind(step)
    assert (asked.token_ids, asked.num_computed_tokens) == ([*range(5), 7], 5)
    assert (len(asked.block_table), asked.has_drafts, scheduler.blocks.num_available) == (2, False, 30)


def test_requests_that_are_followed_are_in_no_series() -> None:
    scripted = Scripted(followed=(B,))
    scheduler = new_scheduler(scripted)
    decoding(scheduler, request(A), request(B))
    assert [stepped(scheduler, 9)[0].series for _ in range(3)] == [None] * 3
    assert [key for key, _ in scripted.asked] == [B] * 3
    scheduler.requests.remove(B)
    assert stepped(scheduler, 9)[0].series is not None


def test_a_series_ends_as_soon_as_a_request_in_it_is_followed() -> None:
    scripted = Scripted(11, 12, followed=())
    scheduler = new_scheduler(scripted)
    decoding(scheduler, request(A), request(B))
    first, *others = [stepped(scheduler, 9)[0] for _ in range(3)]
    assert first.series is not None
    assert [step.series for step in others] == [first.series] * 2
    scripted.followed = (B,)
    step, _ = stepped(scheduler, 11, 12, 9)
    assert step.series is None
    assert [(share.key, share.num_drafts) for share in step.requests] == [(A, 0), (B, 2)]
    scripted.followed = ()
    assert stepped(scheduler, 9)[0].series is not None


def test_what_is_kept_of_a_request_is_forgotten_when_it_leaves() -> None:
    scripted = Scripted(11)
    scheduler = new_scheduler(scripted)
    decoding(scheduler, request(A), request(B))
    scheduler.requests.remove(A)
    assert scripted.forgotten == [A]


def test_drafts_are_counted_by_method_and_place() -> None:
    scheduler = new_scheduler(Scripted(11, 12, 13))
    decoding(scheduler, request(A))
    stepped(scheduler, 11, 12, 9)
    stepped(scheduler, 9)
    counts = scheduler.drafts.counts
    assert counts.by_method() == (DraftsOfMethod("script", 2, (2, 2, 2), (1, 1)),)
    assert not counts.undrafted


def test_requests_of_a_model_whose_states_cannot_go_back_are_counted_once_each() -> None:
    scripted = Scripted(11)
    scheduler = new_scheduler(scripted, max_num_drafts=0)
    decoding(scheduler, request(A), request(B))
    for _ in range(3):
        step, _ = stepped(scheduler, 9)
        assert [share.num_drafts for share in step.requests] == [0, 0]
    for key in (A, B):
        scheduler.requests.remove(key)
    assert scheduler.drafts.counts.undrafted == {"states": 2}
    assert not scripted.asked


def test_a_token_behind_drafts_that_the_grammar_of_the_output_refuses_is_drawn_again() -> None:
    matcher = FakeMatcher(length=99)
    scheduler, asked = new_scheduler(Scripted(11, 12, 13)), replace(request(A), matcher=matcher)
    decoding(scheduler, asked)
    matcher.refused_late = 12
    _, (output,) = stepped(scheduler, 11, 12, 13, 14)
    assert (output.token_ids, output.has_left) == ([11], False)
    assert asked.token_ids[-1] == 11
    assert asked.num_computed_tokens == len(asked.token_ids) - 1
    step = scheduler.schedule()
    assert step.requests[0].start == asked.num_computed_tokens
    assert matcher.output == [7, 11]
