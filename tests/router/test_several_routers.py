"""What a router knows and does about others that share its nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.router.requests.retries import FailureReasons
from baton.router.routing.policies import LeastLoaded
from baton.wire.errors import Overloaded, RequestFailed
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE, Pong, Welcome
from baton.wire.request_key import OWNER_BYTES, owner_of_epoch
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.rig import DEFAULTS, PROMPT, Rig, relaying


def refuse(node: FakeNode, leg: LegMessage) -> None:
    node.fail(leg, "overloaded")


async def others_have(rig: Rig, node: FakeNode, num_legs: int, num_prompt_tokens: int = 0) -> None:
    """The node tells the router what others have there."""
    member = rig.member(node)
    number = member.session.number
    node.is_beating = False  # the answers of `FakeNode` itself know of no others
    node.send(Pong(number, number, number, b"", num_legs, num_prompt_tokens))
    async with asyncio.timeout(10.0):
        while member.num_other_legs != num_legs:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_requests_have_the_epoch_of_their_router_in_their_ids() -> None:
    async with relaying() as first, relaying() as second:
        for rig in (first, second):
            node = rig.dial(DECODE)
            assert (await node.expect(Welcome)).epoch == rig.registry.epoch
            call = rig.call()
            leg = await node.expect(Decode)
            assert leg.handoff_id[:OWNER_BYTES] == owner_of_epoch(rig.registry.epoch)
            await call.cancel()
        assert first.registry.epoch != second.registry.epoch


async def test_what_others_have_at_a_node_counts_as_its_load() -> None:
    async with relaying(decode_policy=LeastLoaded()) as rig:
        busy, free = await rig.join(DECODE), await rig.join(DECODE)
        await others_have(rig, busy, 2, 300)
        assert (rig.member(busy).load, rig.member(busy).num_legs) == (2, 0)
        assert rig.member(busy).num_other_prompt_tokens == 300
        calls = [rig.call() for _ in range(2)]
        for _ in calls:
            await free.expect(Decode)
        assert not busy.has(Decode)
        for call in calls:
            await call.cancel()


async def test_what_others_have_leaves_less_to_admit_but_half_at_least() -> None:
    async with relaying() as rig:
        node = await rig.join(DECODE, max_num_seqs=10)
        assert rig.relay.capacity == 40
        await others_have(rig, node, 15)
        assert rig.relay.capacity == 25
        await others_have(rig, node, 40)
        assert rig.relay.capacity == 20


async def test_a_node_that_has_no_room_costs_no_attempt() -> None:
    async with relaying(replace(DEFAULTS, max_attempts=1)) as rig:
        full = await rig.join(DECODE, refuse)
        await rig.join(DECODE, answering([5, 6]))
        for _ in range(4):
            assert await rig.call(PROMPT).result() == [5, 6]
        assert full.has(Decode)


def test_refusals_are_no_failures_and_wait_longer_each_time() -> None:
    reasons = FailureReasons(2)
    delays = [reasons.failed(0.0, Overloaded("no room")) for _ in range(10)]
    assert reasons.allow_another
    assert delays == sorted(delays)
    reasons.failed(0.0, RequestFailed("no luck"))
    reasons.failed(0.0, RequestFailed("no luck"))
    assert not reasons.allow_another
