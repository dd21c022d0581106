"""A decode node leaves: the requests that generate there go on at another one, whatever happens to whom meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

import baton.router.nodes.control
import baton.router.requests.moves
from baton.router.requests.relay import RelaySettings
from baton.wire.errors import RequestFailed, TransferFailed
from baton.wire.messages.legs import Cancel, Decode, HandedOver, HandOver, Prefill
from baton.wire.messages.membership import DECODE, PREFILL, Drain, live_key
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import FakeNode, first_index
from tests.router.rig import DEFAULTS, PROMPT, Call, Rig, relaying

ADDRESS = "tcp://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.requests.moves, "FIRST_ROUND_S", 0.005)
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)


@dataclass(slots=True)
class Stage:
    """A request that generates on `left`, and another decode node. No prefill node."""

    rig: Rig
    left: FakeNode
    other: FakeNode
    call: Call
    leg: Decode

    async def ordered(self) -> HandOver:
        """The node leaves; what the router asks of it then."""
        self.left.leave()
        return await self.left.expect(HandOver)

    async def moved(self) -> Decode:
        """The node hands the request over; the leg of the other one."""
        hand_over(self.left, await self.ordered(), len(PROMPT) + len(self.call.token_ids) - 1)
        return await self.other.expect(Decode)

    async def ends_well(self, node: FakeNode, leg: Decode) -> None:
        """The tokens 1 to 9 reach the client once each, in order."""
        for number in range(first_index(leg), 9):
            node.emit(leg, [number + 1], number, "length" if number == 8 else "")
        assert await self.call.result() == list(range(1, 10))
        await self.rig.settle()


def hand_over(node: FakeNode, order: HandOver, num_tokens: int) -> None:
    """Answer an order as a decode node does."""
    if num_tokens:
        node.live.discard(live_key(order.handoff_id, order.attempt))
        node.live.add(live_key(order.handoff_id, order.next_attempt))
    node.send(HandedOver(node.hello.epoch, order.handoff_id, order.next_attempt, num_tokens))


@asynccontextmanager
async def generating(settings: RelaySettings = DEFAULTS, num_tokens: int = 3) -> AsyncIterator[Stage]:
    async with relaying(settings) as rig:
        left = await rig.join(DECODE, peer_address=ADDRESS)
        call = rig.call(params=DecodingParams(max_tokens=9, seed=5, temperature=0.7), cache_salt=b"tenant")
        leg = await left.expect(Decode)
        for number in range(num_tokens):
            left.emit(leg, [number + 1], number)
        await call.has_tokens(num_tokens)
        yield Stage(rig, left, await rig.join(DECODE, peer_address=ADDRESS), call, leg)


async def test_the_other_node_goes_on_behind_the_last_token_that_was_sent() -> None:
    async with generating() as stage:
        order = await stage.ordered()
        assert (order.handoff_id, order.attempt) == (stage.leg.handoff_id, stage.leg.attempt)
        assert (order.decode_node_id, order.decode_epoch) == (stage.other.hello.node_id, stage.other.hello.epoch)
        stage.left.emit(stage.leg, [4], 3)  # it went on until it was asked
        hand_over(stage.left, order, len(PROMPT) + 3)
        leg = await stage.other.expect(Decode)
        assert (leg.handoff_id, leg.attempt) == (order.handoff_id, order.next_attempt)
        assert (leg.prompt.followed_by(leg.output_ids), leg.prompt.num_tokens) == ((*PROMPT, 1, 2, 3), len(PROMPT))
        assert (leg.params, leg.prompt.cache_salt) == (stage.leg.params, stage.leg.prompt.cache_salt)
        assert leg.prefill_peer is not None
        assert (leg.prefill_peer.epoch, leg.prefill_peer.address) == (stage.left.hello.epoch, ADDRESS)
        await stage.ends_well(stage.other, leg)
        counters = stage.rig.relay.counters
        assert (counters.num_moves, counters.num_retries) == (1, 0)
        assert not stage.left.has(Cancel)


async def test_a_drained_node_is_asked_to_end_and_gets_nothing_more() -> None:
    async with generating() as stage:
        stage.rig.relay.drain(stage.rig.member(stage.left), starts_again=True)
        assert await stage.left.expect(Drain) == Drain(starts_again=True)
        hand_over(stage.left, await stage.left.expect(HandOver), len(PROMPT) + 2)
        leg = await stage.other.expect(Decode)
        later = stage.rig.call()
        assert (await stage.other.expect(Decode)).attempt == 1
        await later.cancel()
        await stage.ends_well(stage.other, leg)


async def test_a_node_that_says_it_leaves_hears_at_once_that_this_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 60.0)
    async with relaying() as rig:
        node = await rig.join(DECODE)
        node.leave()
        async with asyncio.timeout(10):
            while not node.num_pings:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert rig.member(node).is_leaving


async def test_what_the_node_said_before_it_was_asked_is_not_lost_with_late_events() -> None:
    """The attempt that was left says something more, which nobody may hear."""
    async with generating() as stage:
        leg = await stage.moved()
        stage.left.emit(stage.leg, [77], 3)
        await stage.rig.has_heard(stage.left)
        await stage.ends_well(stage.other, leg)


async def test_a_node_that_cannot_hand_over_now_goes_on_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.requests.moves.ASK_AGAIN_S", 0.01)
    async with generating() as stage:
        order = await stage.ordered()
        hand_over(stage.left, order, 0)
        stage.left.emit(stage.leg, [4], 3)
        await stage.call.has_tokens(4)
        again = await stage.left.expect(HandOver)
        assert (again.attempt, again.next_attempt) == (order.attempt, order.next_attempt + 1)
        hand_over(stage.left, again, len(PROMPT) + 3)
        await stage.ends_well(stage.other, await stage.other.expect(Decode))


async def test_without_another_node_it_is_finished_where_it_is() -> None:
    async with generating() as stage:
        stage.other.die()
        await stage.rig.loses_all_but(DECODE, 1)
        stage.left.leave()
        await stage.rig.loses(DECODE)
        await stage.ends_well(stage.left, stage.leg)
        assert not stage.left.has(HandOver)


async def test_another_node_without_room_is_left_alone_until_it_has_some() -> None:
    async with generating() as stage:
        full = replace(stage.other.hello.status, num_free_blocks=2)
        stage.rig.member(stage.other).status = full
        stage.other.hello = replace(stage.other.hello, status=full)
        stage.left.leave()
        await stage.rig.loses_all_but(DECODE, 1)
        stage.left.emit(stage.leg, [4], 3)
        await stage.call.has_tokens(4)
        assert not stage.left.has(HandOver)
        room = replace(full, num_cached_blocks=60)
        stage.rig.member(stage.other).status = room
        stage.other.hello = replace(stage.other.hello, status=room)
        hand_over(stage.left, await stage.left.expect(HandOver), len(PROMPT) + 3)
        await stage.ends_well(stage.other, await stage.other.expect(Decode))


async def test_a_request_whose_kv_is_on_its_way_is_moved_once_it_generates() -> None:
    async with relaying() as rig:
        prefill = await rig.join(PREFILL)
        left = await rig.join(DECODE, peer_address=ADDRESS)
        call = rig.call(params=DecodingParams(max_tokens=9))
        prefill_leg, leg = await prefill.expect(Prefill), await left.expect(Decode)
        prefill.emit(prefill_leg, [1])
        await call.has_tokens(1)
        other = await rig.join(DECODE)
        left.leave()
        await rig.loses_all_but(DECODE, 1)
        await rig.has_heard(left)
        assert not left.has(HandOver), "the handoff is finished first"
        left.emit(leg, [1, 2], 0)
        hand_over(left, await left.expect(HandOver), len(PROMPT) + 1)
        await Stage(rig, left, other, call, leg).ends_well(other, await other.expect(Decode))


@pytest.mark.parametrize("who", ["left", "other"])
async def test_a_node_that_dies_before_the_answer_costs_an_attempt(who: str) -> None:
    async with generating(replace(DEFAULTS, max_attempts=2)) as stage:
        third = await stage.rig.join(DECODE)
        stage.rig.member(third).num_legs += 5  # the move prefers the other one
        order = await stage.ordered()
        victim = stage.left if who == "left" else stage.other
        victim.die()
        async with asyncio.timeout(10):
            while stage.rig.registry.get(victim.hello.epoch) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        survivors = [third]
        if who == "other":
            hand_over(stage.left, order, len(PROMPT) + 2)
            assert (await stage.left.expect(Cancel)).attempt == order.next_attempt, "nobody takes its KV"
        else:
            survivors.append(stage.other)
        leg, node = await _first_leg(survivors)
        stage.rig.member(third).num_legs -= 5
        assert leg.prefill_peer is None, "computed again"
        assert leg.prompt.followed_by(leg.output_ids) == (*PROMPT, 1, 2, 3)
        assert leg.attempt > order.next_attempt, "the number that the node was told is not used for anything else"
        await stage.ends_well(node, leg)


@pytest.mark.parametrize("who", ["left", "other"])
async def test_a_node_that_dies_in_a_move_costs_an_attempt(who: str) -> None:
    async with generating(replace(DEFAULTS, max_attempts=2)) as stage:
        moved = await stage.moved()
        third = await stage.rig.join(DECODE)
        victim, alive = (stage.left, stage.other) if who == "left" else (stage.other, stage.left)
        victim.die()
        cancelled = await alive.expect(Cancel)
        assert (cancelled.handoff_id, cancelled.attempt) == (moved.handoff_id, moved.attempt)
        leg, node = await _first_leg([third] if who == "other" else [third, stage.other])
        assert leg.prompt.followed_by(leg.output_ids) == (*PROMPT, 1, 2, 3)
        assert leg.attempt == moved.attempt + 1
        await stage.ends_well(node, leg)


async def test_the_node_that_was_left_may_end_once_the_other_one_goes_on() -> None:
    async with generating() as stage:
        leg = await stage.moved()
        stage.other.emit(leg, [3, 4], 2)
        await stage.call.has_tokens(4)
        stage.left.die()
        async with asyncio.timeout(10):
            while stage.rig.registry.get(stage.left.hello.epoch) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        for number in range(4, 9):
            stage.other.emit(leg, [number + 1], number, "length" if number == 8 else "")
        assert await stage.call.result() == list(range(1, 10))
        assert stage.rig.relay.counters.num_retries == 0


@pytest.mark.parametrize("code", [TransferFailed.code, RequestFailed.code])
async def test_a_move_that_fails_is_an_attempt_that_failed(code: str) -> None:
    async with generating() as stage:
        moved = await stage.moved()
        stage.other.fail(moved, code)
        assert (await stage.left.expect(Cancel)).attempt == moved.attempt
        leg = await stage.other.expect(Decode)
        assert (leg.attempt, leg.prefill_peer) == (moved.attempt + 1, None)
        await stage.ends_well(stage.other, leg)


async def test_the_attempt_fails_before_the_answer() -> None:
    async with generating() as stage:
        order = await stage.ordered()
        stage.left.fail(stage.leg, RequestFailed.code)
        leg = await stage.other.expect(Decode)
        assert leg.attempt > order.next_attempt
        hand_over(stage.left, order, len(PROMPT) + 2)
        async with asyncio.timeout(10):
            while (await stage.left.expect(Cancel)).attempt != order.next_attempt:
                pass
        await stage.ends_well(stage.other, leg)
        assert stage.rig.relay.counters.num_moves == 0


async def test_something_else_was_handed_over_than_the_client_has() -> None:
    async with generating() as stage:
        order = await stage.ordered()
        hand_over(stage.left, order, len(PROMPT) + 3)
        assert (await stage.left.expect(Cancel)).attempt == order.next_attempt
        leg = await stage.other.expect(Decode)
        assert (leg.prompt.followed_by(leg.output_ids), leg.prefill_peer) == ((*PROMPT, 1, 2, 3), None)
        await stage.ends_well(stage.other, leg)


async def test_the_client_leaves_before_the_answer() -> None:
    async with generating() as stage:
        order = await stage.ordered()
        await stage.call.cancel()
        assert (await stage.left.expect(Cancel)).attempt == order.attempt
        hand_over(stage.left, order, len(PROMPT) + 2)
        assert (await stage.left.expect(Cancel)).attempt == order.next_attempt
        await stage.rig.settle()


async def test_the_client_leaves_in_a_move() -> None:
    async with generating() as stage:
        leg = await stage.moved()
        await stage.call.cancel()
        for node in (stage.left, stage.other):
            assert (await node.expect(Cancel)).attempt == leg.attempt
        await stage.rig.settle()


async def test_the_last_token_comes_instead_of_the_answer() -> None:
    """The node had sampled it when it was asked, so there is nothing to hand over."""
    async with generating() as stage:
        order = await stage.ordered()
        for number in range(3, 9):
            stage.left.emit(stage.leg, [number + 1], number, "length" if number == 8 else "")
        hand_over(stage.left, order, 0)
        assert await stage.call.result() == list(range(1, 10))
        await stage.rig.settle()
        assert stage.rig.relay.counters.num_moves == 0


async def test_only_a_few_requests_are_moved_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.requests.moves, "MAX_AT_ONCE", 2)
    async with relaying() as rig:
        left = await rig.join(DECODE, peer_address=ADDRESS)
        calls = [rig.call() for _ in range(4)]
        for _ in calls:
            left.emit(await left.expect(Decode), [1], 0)
        for call in calls:
            await call.has_tokens(1)
        other = await rig.join(DECODE)
        left.leave()
        orders = [await left.expect(HandOver) for _ in range(2)]
        await asyncio.sleep(5 * baton.router.requests.moves.ROUND_S)
        assert not left.has(HandOver)
        for order in orders:
            hand_over(left, order, len(PROMPT))
            other.emit(await other.expect(Decode, handoff_id=order.handoff_id), [1, 2], 0, "length")
        orders = [await left.expect(HandOver) for _ in range(2)]
        for order in orders:
            hand_over(left, order, len(PROMPT))
            other.emit(await other.expect(Decode, handoff_id=order.handoff_id), [1, 2], 0, "length")
        assert [await call.result() for call in calls] == [[1, 2]] * 4
        await rig.settle()


async def test_log_probabilities_of_the_prompt_are_not_asked_for_again() -> None:
    async with relaying() as rig:
        left = await rig.join(DECODE, peer_address=ADDRESS)
        call = rig.call(params=DecodingParams(max_tokens=2, prompt_logprobs=0))
        leg = await left.expect(Decode)
        other = await rig.join(DECODE)
        left.tell_prompt(leg)
        left.emit(leg, [1], 0)
        left.leave()
        hand_over(left, await left.expect(HandOver), len(PROMPT))
        moved = await other.expect(Decode)
        assert moved.params.prompt_logprobs is None
        other.emit(moved, [1, 2], 0, "length")
        assert await call.result() == [1, 2]


async def _first_leg(nodes: list[FakeNode]) -> tuple[Decode, FakeNode]:
    """The next decode leg of any of these nodes."""
    async with asyncio.timeout(10):
        while True:
            for node in nodes:
                if node.has(Decode):
                    return await node.expect(Decode), node
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Copying:
    """A request whose KV is copied ahead: the orders for the copy, and its leg at the other node."""

    order: HandOver
    leg: Decode


async def copying(stage: Stage) -> Copying:
    """The node leaves, and is asked for a copy of the full blocks first."""
    order = await stage.ordered()
    assert order.goes_on
    stage.left.live.add(live_key(order.handoff_id, order.next_attempt))
    stage.left.send(HandedOver(stage.left.hello.epoch, order.handoff_id, order.next_attempt, len(PROMPT)))
    leg = await stage.other.expect(Decode)
    assert (leg.attempt, leg.prompt.followed_by(leg.output_ids)) == (order.next_attempt, PROMPT)
    assert leg.prefill_peer is not None
    return Copying(order, leg)


@pytest.fixture
def _copies_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.requests.moves.AHEAD_TOKENS", 8)


@pytest.mark.usefixtures("_copies_ahead")
@pytest.mark.parametrize("end", ["it has arrived", "it has failed"])
async def test_a_long_context_is_copied_ahead_while_the_stream_goes_on_and_then_moved(end: str) -> None:
    async with generating() as stage:
        copy = await copying(stage)
        stage.left.emit(stage.leg, [4], 3)
        await stage.call.has_tokens(4)
        if end == "it has arrived":
            stage.other.emit(copy.leg, [1], 0)
            cancel = await stage.other.expect(Cancel)
            assert (cancel.handoff_id, cancel.attempt) == (copy.leg.handoff_id, copy.leg.attempt)
        else:
            stage.other.fail(copy.leg, TransferFailed.code)
        order = await stage.left.expect(HandOver)
        assert (order.goes_on, order.decode_epoch) == (False, stage.other.hello.epoch)
        assert order.next_attempt > copy.leg.attempt
        hand_over(stage.left, order, len(PROMPT) + 3)
        leg = await stage.other.expect(Decode)
        assert leg.prompt.followed_by(leg.output_ids) == (*PROMPT, 1, 2, 3)
        await stage.ends_well(stage.other, leg)
        assert stage.rig.relay.counters.num_retries == 0


@pytest.mark.usefixtures("_copies_ahead")
async def test_a_copy_that_does_not_come_is_given_up() -> None:
    async with generating() as stage:
        copy = await copying(stage)
        (flight,) = stage.rig.relay._flights.values()
        flight._moves._copy_until_s = 1e-9  # its time is over
        order = await stage.left.expect(HandOver)
        assert not order.goes_on
        assert (await stage.left.expect(Cancel)).attempt == copy.leg.attempt
        hand_over(stage.left, order, len(PROMPT) + 2)
        await stage.ends_well(stage.other, await stage.other.expect(Decode))


@pytest.mark.usefixtures("_copies_ahead")
async def test_a_client_that_leaves_ends_the_copy_at_both_nodes() -> None:
    async with generating() as stage:
        copy = await copying(stage)
        await stage.call.cancel()
        assert (await stage.other.expect(Cancel)).attempt == copy.leg.attempt
        cancelled = {(await stage.left.expect(Cancel)).attempt for _ in range(2)}
        assert cancelled == {stage.leg.attempt, copy.leg.attempt}
        await stage.rig.settle()


@pytest.mark.usefixtures("_copies_ahead")
async def test_when_the_other_node_is_lost_with_a_copy_the_stream_goes_on_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.requests.moves.MAX_AHEAD_S", 1e6)
    async with generating() as stage:
        copy = await copying(stage)
        stage.other.die()
        assert (await stage.left.expect(Cancel)).attempt == copy.leg.attempt
        await stage.ends_well(stage.left, replace(stage.leg, output_ids=(1, 2, 3)))
        assert stage.rig.relay.counters.num_retries == 0
