"""For how many reasons a request is given up, and how long each further attempt waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import baton.router.nodes.control
from baton.router.requests.retries import FIRST_DELAY_S, LAST_DELAY_S, QUIET_S, FailureReasons
from baton.wire.errors import Overloaded, RequestFailed, TransferFailed
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.rig import DEFAULTS, PROMPT, relaying
from tests.router.test_sessions import cut

TWICE = replace(DEFAULTS, max_attempts=2, node_wait_s=20.0)
STEP_FAILED, KV_LOST = RequestFailed("no luck"), RequestFailed("no KV", TransferFailed.code)


def test_a_lost_node_is_one_reason_and_none_when_it_comes_back() -> None:
    reasons = FailureReasons(2)
    for _ in range(3):
        reasons.failed(0.0, STEP_FAILED, 7)
    assert reasons.allow_another
    reasons.failed(0.0, STEP_FAILED, 8)
    assert not reasons.allow_another
    reasons.is_back(7)
    assert reasons.allow_another
    reasons.failed(0.0, STEP_FAILED)
    assert not reasons.allow_another
    reasons.is_back(9)
    assert not reasons.allow_another


def test_two_handoffs_that_fail_are_one_reason_and_a_refusal_is_none() -> None:
    reasons = FailureReasons(2)
    for error in (KV_LOST, Overloaded("no room"), KV_LOST):
        reasons.failed(0.0, error)
    assert reasons.allow_another
    reasons.failed(0.0, KV_LOST)
    assert not reasons.allow_another, "a node for which nothing but handoffs fails is not asked for ever"


def test_failures_in_a_row_wait_longer_each_time_and_a_quiet_time_ends_the_row() -> None:
    reasons = FailureReasons(100)
    first = [reasons.failed(0.0, STEP_FAILED) for _ in range(7)]
    assert first[:4] == [0.0, FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert first[-1] == LAST_DELAY_S
    assert reasons.failed(QUIET_S, STEP_FAILED) == LAST_DELAY_S
    assert reasons.failed(2 * QUIET_S + 0.1, STEP_FAILED) == 0.0


async def test_a_connection_that_breaks_more_often_than_a_request_may_fail_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(baton.router.nodes.control, "UNREACHABLE_S", 0.02)
    monkeypatch.setattr("baton.router.requests.retries.FIRST_DELAY_S", 0.01)
    async with relaying(TWICE) as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        for number in range(4):
            leg = await node.expect(Decode)
            assert leg.prompt.followed_by(leg.output_ids) == (*PROMPT, *range(number))
            node.emit(leg, [number], number)
            await call.has_tokens(number + 1)
            await cut(rig, node)
            await rig.loses(DECODE)
            node.dial_again()
        leg = await node.expect(Decode)
        node.emit(leg, [4], 4, finish="stop")
        assert await call.result() == [0, 1, 2, 3, 4]
        await rig.settle()


async def test_nodes_that_are_lost_together_are_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)
    async with relaying(TWICE) as rig:
        pairs = [await rig.pair(), await rig.pair()]
        call = rig.call()
        await rig.has_in_flight(1)
        for node in (*pairs[0], *pairs[1]):
            node.die()
        await rig.loses_all_but(DECODE, 0)
        reborn = await rig.join(DECODE)
        leg = await reborn.expect(Decode)
        assert leg.attempt == 2
        reborn.emit(leg, [1], finish="stop")
        assert await call.result() == [1]
