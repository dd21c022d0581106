"""Tokens that a grammar forces are taken at once and computed as one chunk, as far as the request may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.output_ends import OutputEnds
from baton.engine.scheduler.request import MAX_FORCED, Fork, Request
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step import RequestOutput, SampledToken, Step
from baton.wire.messages.output import TokenLogprobs
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.test_matchers import GRAMMAR, FakeMatcher
from tests.request_keys import key_of

A, B = key_of("a"), key_of("b")
EOS = 60


def _scheduler(num_blocks: int = 32, budget: int = 16, *, jumps_ahead: bool = True) -> Scheduler:
    limits = SchedulerLimits(4, 4, budget, 64, jumps_ahead=jumps_ahead)
    return Scheduler(BlockPool(num_blocks, prefix_caching=False), limits, frozenset({EOS}))


def _request(key: RequestKey, forced: Sequence[int], **members: Any) -> Request:
    matcher = FakeMatcher(length=99)
    matcher.forced = list(forced)
    params = DecodingParams(grammar=GRAMMAR, **{"max_tokens": 50, **members})
    return Request(key, Prompt.of(range(5)), params, b"", 64, matcher=matcher)


def forced_of(output: RequestOutput) -> list[int]:
    return output.token_ids[len(output.tokens) - output.num_forced :]


def _step(scheduler: Scheduler, token_id: int) -> tuple[Step, list[RequestOutput]]:
    step = scheduler.schedule()
    scheduler.advance(step)
    scores = TokenLogprobs(-1.0, (), ())
    sampled = {
        key: (SampledToken(token_id, scores if share.params.logprobs is not None else None),)
        for share in step.requests
        if share.needs_sample
        for key in (share.key, *(fork.key for fork in share.forks))
    }
    return step, scheduler.apply(step, sampled)


def test_forced_tokens_come_with_the_sampled_one_and_are_computed_as_one_chunk() -> None:
    scheduler = _scheduler()
    request = _request(A, [8, 9, 10])
    scheduler.add(request)
    _, (output,) = _step(scheduler, 7)
    assert (output.token_ids, output.num_forced, output.output_index) == ([7, 8, 9, 10], 3, 0)
    step, (output,) = _step(scheduler, 11)
    (share,) = step.requests
    assert (share.start, share.num_tokens, share.needs_sample) == (5, 4, True)
    assert (output.output_index, output.num_forced, output.num_computed_tokens) == (4, 0, 9)
    assert request.token_ids[5:] == [7, 8, 9, 10, 11]
    assert len(request.block_table) * 4 >= 9
    step, _ = _step(scheduler, 12)
    assert [share.num_tokens for share in step.requests] == [1]


def test_a_chunk_of_forced_tokens_keeps_to_the_budget_and_holds_up_nobody_who_decodes() -> None:
    scheduler = _scheduler(budget=6)
    scheduler.add(_request(A, range(10, 20)))
    _step(scheduler, 7)
    scheduler.add(_request(B, []))
    counts = [{share.key: share.num_tokens for share in _step(scheduler, 8)[0].requests} for _ in range(3)]
    assert counts[0] == {A: 6}
    assert counts[1] == {A: 5, B: 1}
    assert counts[2] == {A: 1, B: 4}


@pytest.mark.parametrize(
    ("members", "forced", "reason"),
    [
        ({"max_tokens": 3}, [8, 9], "length"),
        ({"stop_token_ids": (9,)}, [8, 9], "stop"),
        ({}, [8, 9, EOS], "stop"),
        ({"min_tokens": 9}, [8, 9, EOS, 11], ""),
    ],
)
def test_an_end_among_forced_tokens_is_the_end(members: dict[str, Any], forced: list[int], reason: str) -> None:
    scheduler = _scheduler()
    scheduler.add(_request(A, [8, 9, EOS, 11], **members))
    _, (output,) = _step(scheduler, 7)
    assert (forced_of(output), output.finish_reason, output.has_left) == (forced, reason, bool(reason))


def test_the_last_forced_token_may_complete_the_output() -> None:
    scheduler = _scheduler()
    matcher = FakeMatcher(length=3)
    matcher.forced = [8, 9, 10]
    scheduler.add(replace(_request(A, []), matcher=matcher))
    _, (output,) = _step(scheduler, 7)
    assert (forced_of(output), output.finish_reason, output.has_left) == ([8, 9], "complete", True)


def test_a_grammar_that_forces_for_ever_is_followed_piece_by_piece() -> None:
    request = replace(_request(A, [8] * 500, max_tokens=None), max_total_tokens=1000)
    request.token_ids.append(7)
    sampled = RequestOutput(A, 1, 5, 0, 0, (SampledToken(7, None),), "", has_left=False, has_failed=False)
    ends = OutputEnds(frozenset(), jumps_ahead=True, clock=lambda: 0.0)
    assert ends.jump(request, sampled).num_forced == MAX_FORCED


def test_a_jump_that_takes_long_goes_on_behind_the_next_step() -> None:
    request, clock = _request(A, [8] * 9), iter(range(99))
    request.token_ids.append(7)
    sampled = RequestOutput(A, 1, 5, 0, 0, (SampledToken(7, None),), "", has_left=False, has_failed=False)
    ends = OutputEnds(frozenset(), jumps_ahead=True, clock=lambda: 24.0 * next(clock))
    assert forced_of(ends.jump(request, sampled)) == [8, 8, 8]
    assert request.token_ids[5:] == [7, 8, 8, 8]


@pytest.mark.parametrize("members", [{"logprobs": 0}, {"logprobs": 3}, {"allowed_token_ids": (7, 8, 9)}, None])
def test_who_needs_more_than_the_ids_takes_a_step_for_each_token(members: dict[str, Any] | None) -> None:
    scheduler = _scheduler(jumps_ahead=members is not None)
    scheduler.add(_request(A, [8, 9], **(members or {})))
    _, (output,) = _step(scheduler, 7)
    assert forced_of(output) == []
    step, _ = _step(scheduler, 8)
    assert [share.num_tokens for share in step.requests] == [1]


def test_a_request_of_which_one_token_is_wanted_does_not_jump() -> None:
    scheduler = _scheduler()
    scheduler.add(replace(_request(A, [8, 9]), first_token_only=True))
    _, (output,) = _step(scheduler, 7)
    assert (forced_of(output), output.has_left) == ([], True)


def test_each_choice_jumps_by_itself() -> None:
    scheduler = _scheduler()
    request = _request(A, [8, 9])
    scheduler.add(replace(request, forks=(Fork(B, request.params),)))
    _, outputs = _step(scheduler, 7)
    assert [(output.key, forced_of(output)) for output in outputs] == [(A, [8, 9]), (B, [])]
    step, _ = _step(scheduler, 11)
    assert {share.key: share.num_tokens for share in step.requests} == {A: 3, B: 1}


def test_forced_tokens_without_room_preempt_the_newest_and_nothing_ahead_of_a_result() -> None:
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(_request(A, range(10, 16)))
    scheduler.add(_request(B, []))
    _step(scheduler, 7)
    step, _ = _step(scheduler, 8)
    assert [share.key for share in step.requests] == [A]
    assert scheduler.num_preemptions == 1
    assert scheduler.blocks.num_available == 1


def test_a_step_ahead_waits_where_forced_tokens_need_a_preemption() -> None:
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(replace(_request(B, []), matcher=None, params=DecodingParams(max_tokens=50)))
    scheduler.add(_request(A, range(10, 16)))
    first = scheduler.schedule()
    scheduler.advance(first)
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    assert [share.key for share in ahead.requests] == [B]
    scheduler.advance(ahead)
    scheduler.apply(first, {key: (SampledToken(7, None),) for key in (A, B)})
    assert scheduler.schedule_ahead() is None
    scheduler.apply(ahead, {B: (SampledToken(8, None),)})
    assert [share.key for share in scheduler.schedule().requests] == [B]
    assert scheduler.num_preemptions == 1


def test_forced_tokens_come_before_older_prompts() -> None:
    scheduler = _scheduler(budget=8)
    long_prompt = Request(B, Prompt.of(range(40)), DecodingParams(max_tokens=9), b"", 64)
    scheduler.add(replace(_request(A, [8, 9, 10])))
    _step(scheduler, 7)
    scheduler.add(long_prompt)
    long_prompt.arrival = 0
    step, _ = _step(scheduler, 11)
    assert [(share.key, share.num_tokens) for share in step.requests] == [(A, 4), (B, 4)]
