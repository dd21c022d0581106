"""Small crowds; `python -m tests.router.crowds` has large ones, at a router of its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.router.http.admission.admission import AdmissionSettings
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.messages.membership import DECODE
from tests.router.crowds import NUM_SEQS, Door, Paced, answered, come_and_go, count, offer, storm
from tests.router.fake_node import FakeNode
from tests.router.rig import DEFAULTS, MODEL, Server, serving

STEP_S = 0.002
QUEUE = AdmissionSettings(4, max_queued_requests=8, max_queued_tokens=10_000, max_queue_s=30)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts, replace(DEFAULTS, node_wait_s=30.0, max_attempts=20), queue=QUEUE) as running:
        yield running


@pytest.fixture
async def node(server: Server) -> AsyncIterator[FakeNode]:
    joined = await server.rig.join(DECODE, max_num_seqs=NUM_SEQS)
    pace = Paced(joined, step_s=STEP_S)
    yield joined
    pace.close()


async def nothing_is_left(server: Server) -> None:
    await server.rig.settle()
    async with asyncio.timeout(30):
        while any(node.live for node in server.rig.nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    admission = server.endpoints.admission
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_behind_a_storm_of_clients_that_drop_everything_is_as_before(server: Server, node: FakeNode) -> None:
    door = Door(server.host, server.port, MODEL)
    await storm(door, 60)
    await answered(door)
    await nothing_is_left(server)


async def test_of_too_many_requests_each_is_answered_whole_or_told_when_to_come_back(
    server: Server, node: FakeNode
) -> None:
    outcomes = await offer(Door(server.host, server.port, MODEL), per_s=100_000, seconds=0.0006, max_tokens=4)
    kinds = count(outcomes)
    assert set(kinds) == {"whole", "refused"}
    assert kinds["whole"] >= QUEUE.max_concurrent_requests
    await nothing_is_left(server)


async def test_nodes_that_come_and_go_leave_no_request_hanging(server: Server, node: FakeNode) -> None:
    asking = asyncio.create_task(offer(Door(server.host, server.port, MODEL), per_s=40, seconds=0.4, max_tokens=4))
    await come_and_go(node, 12, 0.4)
    assert set(count(await asking)) <= {"whole", "refused"}
    await nothing_is_left(server)
