"""Connections between router and nodes that break, and messages that are lost: no request notices."""

from __future__ import annotations

import asyncio

import pytest

import baton.router.nodes.control
import baton.router.nodes.registry
from baton.wire.messages.legs import Cancel, Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.output import TokenEvent, Tokens
from tests.router.fake_node import FakeNode
from tests.router.rig import Rig, relaying


@pytest.fixture(autouse=True)
def _short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)


def tokens(node: FakeNode, leg: Decode | Prefill, token_id: int, index: int, finish: str = "") -> Tokens:
    event = TokenEvent(leg.handoff_id, leg.attempt, index, (token_id,), (), finish, 0)
    return Tokens(node.hello.epoch, (event,))


async def cut(rig: Rig, node: FakeNode) -> None:
    """Break the connection of `node`, and wait until the router has noticed."""
    node.cut()
    async with asyncio.timeout(10):
        member = rig.member(node)
        while rig.control.is_reachable(member):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_tokens_that_were_lost_are_sent_again() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        leg = await node.expect(Decode)
        node.emit(leg, [1], 0)
        node.lose(tokens(node, leg, 2, 1))
        node.emit(leg, [3], 2)
        node.emit(leg, [4], 3, finish="stop")
        assert await call.result() == [1, 2, 3, 4]
        assert rig.relay.counters.num_retries == 0


async def test_the_last_token_that_was_lost_is_missed_without_another_message() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        leg = await node.expect(Decode)
        node.emit(leg, [1], 0)
        node.lose(tokens(node, leg, 2, 1, "stop"))
        assert await call.result() == [1, 2]
        assert rig.relay.counters.num_retries == 0


async def test_a_short_cut_of_the_connection_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "UNREACHABLE_S", 5.0)
    async with relaying() as rig:
        node = await rig.join(DECODE)
        running = rig.call()
        leg = await node.expect(Decode)
        node.emit(leg, [1], 0)
        await running.has_tokens(1)
        await cut(rig, node)
        node.lose(tokens(node, leg, 2, 1))
        other = rig.call()
        await rig.has_in_flight(2)
        node.dial_again()
        node.emit(leg, [3], 2, finish="stop")
        node.emit(await node.expect(Decode), [7], finish="stop")
        assert await running.result() == [1, 2, 3]
        assert await other.result() == [7]
        assert rig.relay.counters.num_retries == 0
        await rig.settle()


async def test_a_cancel_reaches_a_node_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "UNREACHABLE_S", 5.0)
    async with relaying() as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        leg = await node.expect(Decode)
        await cut(rig, node)
        await call.cancel()
        node.dial_again()
        assert await node.expect(Cancel) == Cancel(leg.handoff_id, 1)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_a_request_that_its_node_has_forgotten_is_tried_again(role: str) -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        await prefill.expect(Prefill)
        await decode.expect(Decode)
        (prefill if role == PREFILL else decode).live.clear()
        leg = await decode.expect(Decode)
        assert leg.attempt == 2
        decode.emit(leg, [1], finish="stop")
        assert await call.result() == [1]


async def test_a_decode_node_has_not_forgotten_what_a_prefill_node_may_have_ended() -> None:
    """Its answer ends with token 1; the decode node has been told so, and the router not yet."""
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        leg = await prefill.expect(Prefill)
        await decode.expect(Decode)
        prefill.is_beating = False
        decode.live.clear()
        await has_been_asked(decode, 4)
        await rig.has_heard(decode)
        prefill.emit(leg, [1], finish="stop")
        assert await call.result() == [1]
        assert rig.relay.counters.num_retries == 0


async def has_been_asked(node: FakeNode, times: int) -> None:
    """The node gets so many more pings."""
    before = node.num_pings
    async with asyncio.timeout(10):
        while node.num_pings < before + times:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_prefill_node_may_forget_a_request_when_it_has_sampled_token_1() -> None:
    async with relaying() as rig:
        prefill, decode = await rig.pair()
        call = rig.call()
        prefill.emit(await prefill.expect(Prefill), [1])
        await call.has_tokens(1)
        prefill.live.clear()
        leg = await decode.expect(Decode)
        await has_been_asked(prefill, 4)
        await rig.has_heard(prefill)
        decode.emit(leg, [1, 2], 0, finish="stop")
        assert await call.result() == [1, 2]
        assert rig.relay.counters.num_retries == 0


async def test_a_node_that_begins_anew_has_its_requests_tried_again() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        call = rig.call()
        leg = await node.expect(Decode)
        node.emit(leg, [1])
        await call.has_tokens(1)
        node.send(node.hello)  # in no session
        leg = await node.expect(Decode)
        assert leg.attempt == 2
        node.emit(leg, [2], 1, finish="stop")
        assert await call.result() == [1, 2]
        await rig.settle()


async def test_a_hello_that_is_repeated_before_anything_was_said_changes_nothing() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.is_beating = False  # nor does it answer pings
        member = rig.member(node)
        node.send(node.hello)
        await node.join()
        assert rig.member(node) is member


async def test_messages_of_an_earlier_registration_are_not_taken_for_new_ones() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE)
        assert node.session is not None
        old = node.session
        rig.registry.remove(node.hello.epoch)
        await node.join()
        call = rig.call()
        leg = await node.expect(Decode)
        node.send_raw(*old.frames(tokens(node, leg, 9, 0, "stop")))
        node.emit(leg, [1], finish="stop")
        assert await call.result() == [1]
