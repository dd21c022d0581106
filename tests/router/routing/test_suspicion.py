"""Requests that nodes may have died of: they are not given to more than two nodes, and innocent ones lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

import baton.router.nodes.control
from baton.router.nodes.registry import Node
from baton.router.routing.suspicion import Confinement, Suspicion
from baton.wire.errors import NoNode, RequestFailed
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from tests.router.fake_node import PATIENCE_S, FakeNode, make_hello
from tests.router.rig import DEFAULTS, MODEL, Call, Rig, relaying

LegT = TypeVar("LegT", Decode, Prefill)
MANY = replace(DEFAULTS, max_attempts=50, node_wait_s=20.0)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.router.nodes.control, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(baton.router.nodes.control, "UNREACHABLE_S", 0.05)
    monkeypatch.setattr("baton.router.requests.retries.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("baton.router.requests.retries.DOUBT_S", 0.0)


async def one_of(nodes: Sequence[FakeNode], kind: type[LegT]) -> tuple[FakeNode, LegT]:
    """The node that got the leg, and the leg."""
    async with asyncio.timeout(PATIENCE_S):
        while not (having := [node for node in nodes if node.has(kind)]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return having[0], await having[0].expect(kind)


async def lost(rig: Rig, role: str, node: FakeNode) -> None:
    """Kill a node, and wait until the router has noticed."""
    num_left = len(rig.registry.available(role, MODEL)) - 1
    node.die()
    await rig.loses_all_but(role, num_left)


async def test_a_request_that_two_nodes_died_of_waits_for_these_and_is_given_to_no_third() -> None:
    async with relaying(MANY) as rig:
        nodes = [await rig.join(DECODE, node_id=f"d{number}") for number in range(3)]
        call = rig.call()
        victims = []
        for _ in range(2):
            victims.append((await one_of(nodes, Decode))[0])
            nodes.remove(victims[-1])
            await lost(rig, DECODE, victims[-1])
        other = rig.call()
        assert (await nodes[0].expect(Decode)).attempt == 1
        await rig.join(DECODE, node_id="d3")
        again = await rig.join(DECODE, node_id=victims[0].hello.node_id)
        leg = await again.expect(Decode)
        assert leg.attempt == 3
        again.emit(leg, [1, 2], 0, finish="stop")
        assert await call.result() == [1, 2]
        await other.cancel()


async def test_a_request_that_nodes_die_of_again_and_again_ends() -> None:
    async with relaying(MANY) as rig:
        nodes = [await rig.join(DECODE, node_id=f"d{number}") for number in range(2)]
        call = rig.call()
        for _ in range(3):
            victim, _ = await one_of(nodes, Decode)
            nodes.remove(victim)
            await lost(rig, DECODE, victim)
            nodes.append(await rig.join(DECODE, node_id=victim.hello.node_id))
        with pytest.raises(RequestFailed, match="again and again"):
            await call.result()


async def test_confined_requests_begin_one_at_a_time_so_that_innocent_ones_do_not_end_with_the_other() -> None:
    async with relaying(MANY) as rig:
        node = await rig.join(DECODE, node_id="d0")
        poison, *innocent = [rig.call() for _ in range(3)]
        for name in ("d1", "other"):
            for _ in range(3):
                await node.expect(Decode)
            following = await rig.join(DECODE, node_id=name)
            await lost(rig, DECODE, node)
            node = following
        first = await rig.join(DECODE, node_id="d0")
        confined = await first.expect(Decode)
        await rig.has_heard(first)
        assert not first.has(Decode), "the others wait"
        await lost(rig, DECODE, first)
        second = await rig.join(DECODE, node_id="d1")
        leg = await second.expect(Decode)
        assert leg.handoff_id != confined.handoff_id
        await rig.has_heard(second)
        assert not second.has(Decode), "another one waits"
        second.emit(leg, [1], 0)
        last = await second.expect(Decode)
        second.emit(leg, [2], 1, finish="stop")
        second.emit(last, [1, 2], 0, finish="stop")
        assert not node.has(Decode)
        ends = await asyncio.gather(*(call.result() for call in (poison, *innocent)), return_exceptions=True)
        assert sum(end == [1, 2] for end in ends) == 2
        assert [str(end) for end in ends if isinstance(end, RequestFailed)] == [
            "nodes were lost again and again as they began to compute this request"
        ]
        await rig.settle()


async def test_a_request_that_is_confined_no_longer_begins_once_although_it_had_waited_for_its_turn() -> None:
    async with relaying(MANY) as rig:
        nodes = [await rig.join(DECODE, node_id="d0")]
        calls = [rig.call() for _ in range(2)]
        for name in ("d1", "other"):
            for _ in calls:
                await nodes[-1].expect(Decode)
            nodes.append(await rig.join(DECODE, node_id=name))
            await lost(rig, DECODE, nodes[-2])
        first = await rig.join(DECODE, node_id="d0")
        confined = await first.expect(Decode)
        not_dead = await rig.join(DECODE, node_id="d1", epoch=nodes[1].hello.epoch)
        node, freed = await one_of([first, not_dead, nodes[-1]], Decode)
        first.emit(confined, [1], 0)  # now it is the turn of whoever waits
        await rig.has_heard(first)
        await asyncio.sleep(0)
        first.emit(confined, [2], 1, finish="stop")
        node.emit(freed, [1, 2], 0, finish="stop")
        assert [await call.result() for call in calls] == [[1, 2], [1, 2]]
        assert not any(each.has(Decode) for each in (first, not_dead, nodes[-1])), "it began twice"
        await rig.settle()


async def test_a_handoff_that_failed_first_does_not_hide_that_its_prefill_node_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.requests.retries.FIRST_DELAY_S", 60.0)
    monkeypatch.setattr("baton.router.requests.retries.LAST_DELAY_S", 60.0)
    async with relaying(MANY) as rig:
        decode = await rig.join(DECODE, node_id="d0")
        prefill = await rig.join(PREFILL, node_id="p0")
        call = rig.call()
        for has_died in (False, True):
            leg = await decode.expect(Decode)
            await prefill.expect(Prefill)
            if has_died:
                prefill.die()
            decode.fail(leg, "transfer_failed")
        await rig.loses_all_but(PREFILL, 0)
        (flight,) = rig.relay._flights.values()
        for _ in range(2):
            flight._retries.begin()  # the delay is over
            await decode.expect(Decode)
            await lost(rig, DECODE, decode)
            decode = await rig.join(DECODE, node_id="d0")
        flight._retries.begin()
        with pytest.raises(RequestFailed, match="again and again"):
            await call.result()


async def test_a_request_does_not_end_where_the_third_node_had_only_lost_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.requests.retries.DOUBT_S", 60.0)
    async with relaying(MANY) as rig:
        call, epochs = rig.call(), [1, 2, 3]
        for epoch in epochs:
            node = await rig.join(DECODE, node_id=f"d{epoch % 2}", epoch=epoch)
            await node.expect(Decode)
            await lost(rig, DECODE, node)
        node = await rig.join(DECODE, node_id="d1", epoch=3)
        (flight,) = rig.relay._flights.values()
        flight._retries.begin()  # there is no doubt any more
        leg = await node.expect(Decode)
        node.emit(leg, [1, 2], 0, finish="stop")
        assert await call.result() == [1, 2]


async def two_confined(rig: Rig) -> tuple[list[Call], FakeNode]:
    """Two requests that two nodes were lost with, and one of these nodes, which is back."""
    nodes = [await rig.join(DECODE, node_id="d0")]
    calls = [rig.call() for _ in range(2)]
    for name in ("d1", "other"):
        for _ in calls:
            await nodes[-1].expect(Decode)
        nodes.append(await rig.join(DECODE, node_id=name))
        await lost(rig, DECODE, nodes[-2])
    nodes[-1].leave()
    return calls, await rig.join(DECODE, node_id="d0")


async def test_a_confined_request_that_failed_waits_behind_those_that_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.requests.retries.FIRST_DELAY_S", 0.0)
    async with relaying(MANY) as rig:
        calls, node = await two_confined(rig)
        failed = await node.expect(Decode)
        node.fail(failed, "transfer_failed")
        leg = await node.expect(Decode)
        assert leg.handoff_id != failed.handoff_id
        node.emit(leg, [1], 0, finish="stop")
        node.emit(await node.expect(Decode), [1], 0, finish="stop")
        assert [await call.result() for call in calls] == [[1], [1]]
        await rig.settle()


async def test_however_long_it_takes_a_confined_request_waits_for_its_turn() -> None:
    async with relaying(MANY) as rig:
        calls, node = await two_confined(rig)
        leg = await node.expect(Decode)
        for _ in range(3):
            (waits,) = [flight._retries for flight in rig.relay._flights.values() if flight._retries._node_deadline]
            waits._waited_in_vain(NoNode("its time is over"))
        node.emit(leg, [1], 0, finish="stop")
        node.emit(await node.expect(Decode), [1], 0, finish="stop")
        assert [await call.result() for call in calls] == [[1], [1]]
        await rig.settle()


async def test_when_the_nodes_it_was_lost_with_do_not_come_back_a_request_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.routing.suspicion.MAX_WAIT_S", 0.2)
    async with relaying(MANY) as rig:
        nodes = [await rig.join(DECODE, node_id=f"d{number}") for number in range(3)]
        call = rig.call()
        for _ in range(2):
            victim, _ = await one_of(nodes, Decode)
            nodes.remove(victim)
            await lost(rig, DECODE, victim)
        leg = await nodes[0].expect(Decode)
        nodes[0].emit(leg, [1, 2], 0, finish="stop")
        assert await call.result() == [1, 2]


async def test_without_any_node_a_confined_request_ends() -> None:
    async with relaying(replace(MANY, node_wait_s=0.2)) as rig:
        nodes = [await rig.join(DECODE, node_id=f"d{number}") for number in range(2)]
        call = rig.call()
        for _ in range(2):
            victim, _ = await one_of(nodes, Decode)
            nodes.remove(victim)
            await lost(rig, DECODE, victim)
        with pytest.raises(NoNode):
            await call.result()
        await rig.settle()


async def test_a_stream_that_goes_on_is_not_suspicious_however_many_nodes_die() -> None:
    async with relaying(MANY) as rig:
        nodes = [await rig.join(DECODE, node_id=f"d{number}") for number in range(6)]
        call = rig.call()
        for number in range(5):
            victim, leg = await one_of(nodes, Decode)
            victim.emit(leg, [number], number)
            await call.has_tokens(number + 1)
            nodes.remove(victim)
            await lost(rig, DECODE, victim)
        leg = await nodes[0].expect(Decode)
        nodes[0].emit(leg, [5], 5, finish="stop")
        assert await call.result() == [0, 1, 2, 3, 4, 5]


async def test_prefill_nodes_that_died_of_a_request_do_not_hand_it_to_others() -> None:
    async with relaying(MANY) as rig:
        prefills = [await rig.join(PREFILL, node_id=f"p{number}") for number in range(3)]
        decode = await rig.join(DECODE)
        call = rig.call()
        victims = []
        for _ in range(2):
            victims.append((await one_of(prefills, Prefill))[0])
            prefills.remove(victims[-1])
            await decode.expect(Decode)
            await lost(rig, PREFILL, victims[-1])
        again = await rig.join(PREFILL, node_id=victims[1].hello.node_id)
        prefill_leg, leg = await again.expect(Prefill), await decode.expect(Decode)
        assert leg.prefill_peer is not None
        assert not prefills[0].has(Prefill)
        again.emit(prefill_leg, [1], 0)
        decode.emit(leg, [1, 2], 0, finish="stop")
        assert await call.result() == [1, 2]


def make_node(node_id: str, role: str = DECODE) -> Node:
    hello = make_hello(role, node_id=node_id)
    return Node(hello, MODEL, 0.0, hello.status)


def test_a_node_that_comes_back_in_the_same_life_was_not_lost_to_the_request() -> None:
    first, second = make_node("d0"), make_node("d1")
    suspicion = Suspicion()
    suspicion.lost(first, is_suspicious=True)
    suspicion.lost(second, is_suspicious=True)
    assert suspicion.confinement == Confinement(frozenset(), frozenset({"d0", "d1"}))
    suspicion.is_back(first.epoch)
    assert suspicion.confinement is None


def test_a_request_that_went_on_after_a_suspicious_loss_may_go_anywhere() -> None:
    suspicion = Suspicion()
    suspicion.lost(make_node("d0"), is_suspicious=True)
    suspicion.lost(make_node("d1"), is_suspicious=False)
    assert suspicion.confinement is None


def test_a_node_that_was_silent_and_is_gone_when_the_next_attempt_begins_counts() -> None:
    suspicion, alive = Suspicion(), make_node("p0", PREFILL)
    suspicion.ended([alive], None)
    suspicion.begins({alive.epoch: alive}.get)
    for name in ("p0", "p1"):
        suspicion.ended([make_node(name, PREFILL)], None)
        suspicion.begins(dict[int, Node]().get)
    assert suspicion.confinement == Confinement(frozenset({"p0", "p1"}), frozenset())
    suspicion.ended([make_node("p1", PREFILL)], None)
    with pytest.raises(RequestFailed, match="again and again"):
        suspicion.begins(dict[int, Node]().get)


def test_nodes_that_are_lost_together_count_once_and_the_other_one_where_the_first_comes_back() -> None:
    suspicion, cut, died = Suspicion(), make_node("d0"), make_node("p0", PREFILL)
    suspicion.lost(cut, is_suspicious=True)
    suspicion.ended([cut, died], cut.epoch)
    suspicion.begins(dict[int, Node]().get)
    assert suspicion.confinement is None
    suspicion.lost(make_node("d1"), is_suspicious=True)
    assert suspicion.confinement == Confinement(frozenset(), frozenset({"d0", "d1"}))
    suspicion.is_back(cut.epoch)
    assert suspicion.confinement == Confinement(frozenset({"p0"}), frozenset({"d1"}))
