"""Readers that do not read: their requests give their places up, go on when they read again, and lose nothing."""

from __future__ import annotations

import asyncio

from baton.router.requests.attempt import RelayRequest
from baton.router.requests.inbox import MAX_DUE, Inbox
from baton.wire.messages.legs import Cancel, Decode
from baton.wire.messages.membership import DECODE
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.router.fake_node import FakeNode
from tests.router.rig import MODEL, PROMPT, Rig, relaying

REQUEST = RelayRequest(MODEL, Prompt(PROMPT), DecodingParams(max_tokens=2 * MAX_DUE))


async def paused(rig: Rig, node: FakeNode, leg: Decode) -> None:
    """Generate for a reader that takes nothing, until the node is told to stop."""
    node.emit(leg, range(MAX_DUE - 2), 0)
    for index in range(MAX_DUE - 2, 2 * MAX_DUE - 3):
        node.emit(leg, [index], index)
    assert await node.expect(Cancel) == Cancel(leg.handoff_id, 1)
    await rig.has_heard(node)


async def taken(inbox: Inbox, number: int) -> list[int]:
    token_ids: list[int] = []
    async with asyncio.timeout(30):
        while len(token_ids) < number:
            token_ids += [token_id for _, delivery in await inbox.take() for token_id in delivery.token_ids]
    return token_ids


async def test_a_request_whose_client_does_not_read_gives_its_place_up_and_goes_on_later() -> None:
    async with relaying() as rig:
        node, inbox = await rig.join(DECODE, max_request_tokens=4 * MAX_DUE), Inbox()
        flight = rig.relay.start(REQUEST, inbox)
        await paused(rig, node, await node.expect(Decode))
        assert (rig.member(node).load, rig.relay.node_wait.num_paused) == (0, 1)
        assert not node.has(Decode)
        num_sent = 2 * MAX_DUE - 3
        assert await taken(inbox, num_sent) == list(range(num_sent))
        leg = await node.expect(Decode)
        assert (leg.attempt, leg.prompt.followed_by(leg.output_ids)[len(PROMPT) :]) == (2, tuple(range(num_sent)))
        node.emit(leg, [7], num_sent, finish="length")
        assert await taken(inbox, 1) == [7]
        assert (rig.relay.counters.num_retries, rig.relay.node_wait.num_paused) == (0, 0)
        rig.relay.close(flight)
        await rig.settle()


async def test_others_are_admitted_in_the_place_of_a_request_that_waits_for_its_reader() -> None:
    async with relaying() as rig:
        node, inbox = await rig.join(DECODE, max_num_seqs=2, max_request_tokens=4 * MAX_DUE), Inbox()
        seen: list[int] = []
        rig.relay.node_wait.listen(lambda: seen.append(rig.relay.capacity))
        flight = rig.relay.start(REQUEST, inbox)
        await paused(rig, node, await node.expect(Decode))
        assert seen == [9]
        rig.relay.close(flight)
        assert rig.relay.capacity == 8
        await rig.settle()
