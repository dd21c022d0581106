"""A request with which its node does not go on is tried again, within a bound that follows the node's speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import baton.router.nodes.control
import baton.router.requests.attempt
from baton.router.requests.attempt import MAX_STEPS
from baton.wire.messages.legs import Cancel, Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import FakeNode
from tests.router.rig import Call, Rig, relaying

LOOKS = 6


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(baton.router.requests.attempt, "STANDS_S", 0.05)


@asynccontextmanager
async def standing(rig: Rig, *, num_running: int, num_waiting: int) -> AsyncIterator[tuple[FakeNode, Call, Decode]]:
    """A request that has one token, at a node that says this of itself."""
    node = await rig.join(DECODE)
    status = replace(node.hello.status, num_running=num_running, num_waiting=num_waiting)
    rig.member(node).status, node.hello = status, replace(node.hello, status=status)
    call = rig.call()
    leg = await node.expect(Decode)
    node.emit(leg, [1], 0)
    await call.has_tokens(1)
    yield node, call, leg
    await call.cancel()


async def look(node: FakeNode) -> None:
    """Let the router look at the node's live requests a few times."""
    num_pings = node.num_pings + LOOKS
    async with asyncio.timeout(10):
        while node.num_pings < num_pings:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def run_steps(rig: Rig, node: FakeNode, number: int) -> None:
    """Steps of another request."""
    other = rig.call()
    leg = await node.expect(Decode)
    for index in range(number):
        node.emit(leg, [7], index)
    await other.has_tokens(number)
    await look(node)
    await other.cancel()


async def test_a_request_that_a_node_lists_and_does_not_compute_is_tried_again() -> None:
    async with relaying() as rig, standing(rig, num_running=2, num_waiting=0) as (node, call, leg):
        await look(node)
        await run_steps(rig, node, MAX_STEPS + 1)
        cancel = await node.expect(Cancel, handoff_id=leg.handoff_id)
        assert cancel.attempt == 1
        again = await node.expect(Decode)
        assert again.attempt == 2
        node.emit(again, [2], 1, finish="stop")
        assert await call.result() == [1, 2]


async def test_a_request_at_a_node_that_has_nothing_to_run_is_tried_again() -> None:
    async with relaying() as rig, standing(rig, num_running=0, num_waiting=0) as (node, call, _):
        again = await node.expect(Decode)
        node.emit(again, [2], 1, finish="stop")
        assert await call.result() == [1, 2]


@pytest.mark.parametrize(
    ("num_waiting", "num_steps"), [(1, MAX_STEPS + 1), (0, MAX_STEPS // 4)], ids=["preempted", "slow"]
)
async def test_a_request_that_may_be_waiting_and_one_at_a_slow_node_are_left_alone(
    num_waiting: int, num_steps: int
) -> None:
    async with relaying() as rig, standing(rig, num_running=1, num_waiting=num_waiting) as (node, call, leg):
        await look(node)
        await run_steps(rig, node, num_steps)
        node.emit(leg, [2], 1, finish="stop")
        assert await call.result() == [1, 2]
        assert rig.relay.counters.num_retries == 0
