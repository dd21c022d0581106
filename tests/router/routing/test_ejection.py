"""Nodes that fail whatever they are given: how soon they get nothing any more, and how they come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.router.http.openai.prompts import PromptMaker
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests import retries
from baton.router.routing import ejection
from baton.router.routing.ejection import FIRST_S, LAST_S, MAX_IN_A_ROW, Ejections
from baton.router.routing.policies import LeastLoaded
from baton.wire.errors import Overloaded, RequestFailed, TransferFailed
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from tests.router.fake_node import FakeNode, LegMessage, Script, answering, first_index, make_hello
from tests.router.http_client import fetch
from tests.router.rig import DEFAULTS, MODEL, Rig, relaying, serving


def failing(code: str, *, after_first: bool = False) -> Script:
    """A script: every leg fails, `after_first`: as soon as it has given a token."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        if after_first:
            node.emit(leg, [1], first_index(leg))
        node.fail(leg, code)

    return script


async def ask(rig: Rig, number: int) -> None:
    """So many requests, one after the other, all of which are answered."""
    for _ in range(number):
        assert (await rig.call().result())[-1] == 2
    await rig.settle()


@pytest.mark.parametrize("after_first", [False, True])
async def test_a_decode_node_that_always_fails_is_given_nothing_after_five_failures(after_first: bool) -> None:
    async with relaying(decode_policy=LeastLoaded()) as rig:
        bad = await rig.join(DECODE, failing(RequestFailed.code, after_first=after_first))
        await rig.join(DECODE, answering([1, 2], "stop"))
        await ask(rig, 12)
        legs = [await bad.expect(Decode) for _ in range(MAX_IN_A_ROW)]
        assert len({leg.handoff_id for leg in legs}) == MAX_IN_A_ROW
        assert not bad.has(Decode)
        assert (rig.member(bad).is_ejected, rig.relay.ejections.num_ejections) == (True, 1)


@pytest.mark.parametrize("code", [RequestFailed.code, TransferFailed.code])
async def test_without_a_good_prefill_node_decode_nodes_compute_prompts(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.001)

    def from_peer(node: FakeNode, leg: LegMessage) -> None:
        assert isinstance(leg, Decode)
        if leg.prefill_peer is None:
            answering([1, 2], "stop")(node, leg)
        elif code == TransferFailed.code:
            node.fail(leg, code)

    async with relaying() as rig:
        bad = await rig.join(PREFILL, None if code == TransferFailed.code else failing(code))
        decode = await rig.join(DECODE, from_peer)
        await ask(rig, 8)
        assert [rig.member(node).is_ejected for node in (bad, decode)] == [True, False]
        legs = [await bad.expect(Prefill) for _ in range(MAX_IN_A_ROW)]
        assert [leg.attempt for leg in legs] == [1, 2, 1, 2, 1]
        assert not bad.has(Prefill)


async def test_a_node_that_has_no_room_has_not_failed() -> None:
    async with relaying(decode_policy=LeastLoaded()) as rig:
        full = await rig.join(DECODE, failing(Overloaded.code))
        await rig.join(DECODE, answering([1, 2], "stop"))
        await ask(rig, 8)
        assert not rig.member(full).is_ejected


async def test_where_all_decode_nodes_fail_all_are_used() -> None:
    async with relaying(replace(DEFAULTS, max_attempts=1)) as rig:
        bad = [await rig.join(DECODE, failing(RequestFailed.code)) for _ in range(2)]
        for _ in range(2 * MAX_IN_A_ROW):
            with pytest.raises(RequestFailed):
                await rig.call().result()
        assert all(rig.member(node).is_ejected for node in bad)
        for node in bad:
            node.script = answering([1, 2], "stop")
        await ask(rig, 1)


async def test_operators_see_who_is_ejected_and_a_good_node_is_back_for_good(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        rig = server.rig
        node = await rig.join(DECODE, failing(RequestFailed.code))
        other = await rig.join(DECODE, answering([1, 2], "stop"))
        await ask(rig, 12)

        async def seen() -> tuple[set[str], dict[str, float]]:
            nodes = (await fetch(server, "GET", "/server_info")).json()["nodes"]
            text = (await fetch(server, "GET", "/metrics")).body.decode()
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            of_nodes = {each.labels["node"]: each.value for each in samples if each.name == "baton:node_ejected"}
            return {each["id"] for each in nodes if each["is_ejected"]}, of_nodes

        ids = node.hello.node_id, other.hello.node_id
        assert await seen() == ({ids[0]}, {ids[0]: 1.0, ids[1]: 0.0})
        node.script, other.script = answering([1, 2], "stop"), failing(RequestFailed.code)
        rig.relay.ejections.readmit(rig.relay.ejections._records[node.hello.epoch].until_s)
        await ask(rig, 14)
        assert await seen() == ({ids[1]}, {ids[0]: 0.0, ids[1]: 1.0})


def test_each_time_it_takes_longer_until_one_success_forgets_everything() -> None:
    registry = NodeRegistry({MODEL: None})
    registry.register(make_hello(DECODE, epoch=7), 0.0)
    (node,) = registry.all()
    ejections, now_s = Ejections(registry), 0.0
    for _ in range(ejection.MAX_IN_A_ROW - 1):
        ejections.failed([7], now_s)
    ejections.succeeded(7)
    for _ in range(ejection.MAX_IN_A_ROW - 1):
        ejections.failed([7], now_s)
    assert not node.is_ejected
    for for_s in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LAST_S, LAST_S):
        ejections.failed([7], now_s)
        ejections.succeeded(7)  # of a request that had begun before
        ejections.readmit(now_s + for_s - 0.1)
        assert node.is_ejected
        now_s += for_s
        ejections.readmit(now_s)
        assert not node.is_ejected
    ejections.succeeded(7)
    ejections.failed([7], now_s)
    assert not node.is_ejected
    assert ejections.num_ejections == 6


def test_a_node_that_is_gone_is_forgotten() -> None:
    registry = NodeRegistry({MODEL: None})
    ejections = Ejections(registry)
    for epoch in range(100):
        registry.register(make_hello(DECODE, epoch=epoch), 0.0)
        ejections.failed([epoch], 0.0)
        registry.remove(epoch)
    ejections.failed([], 0.0)
    assert ejections._records == {}
