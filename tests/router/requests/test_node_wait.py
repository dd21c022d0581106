"""Requests that find no node: they wait for one to join, as long as they may."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import NoNode, Overloaded
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE, PREFILL
from tests.router.fake_node import FakeNode, answering
from tests.router.http_client import completion_body, connected, post_completion, request_bytes
from tests.router.rig import DEFAULTS, MODEL, PROMPT, relaying, serving

PATIENT = replace(DEFAULTS, node_wait_s=20.0)
IMPATIENT = replace(DEFAULTS, node_wait_s=0.05)


async def test_a_request_before_the_first_node_waits_for_it(prompts: PromptMaker) -> None:
    async with serving(prompts, PATIENT) as server:
        waiting = asyncio.create_task(post_completion(server))
        await server.rig.waits_for_a_node(1)
        await server.rig.join(DECODE, answering([5], "length"))
        assert (await waiting).status == 200
        await server.rig.settle()


async def test_a_request_waits_for_a_decode_node_when_there_are_only_others(prompts: PromptMaker) -> None:
    async with serving(prompts, PATIENT) as server:
        await server.rig.join(PREFILL)
        waiting = asyncio.create_task(post_completion(server))
        await server.rig.has_in_flight(1)
        await server.rig.join(PREFILL)
        assert server.rig.relay.num_in_flight == 1
        await server.rig.join(DECODE, answering([5], "length"))
        assert (await waiting).status == 200


async def test_a_running_request_goes_on_at_a_node_that_comes_back() -> None:
    async with relaying(PATIENT) as rig:
        decode = await rig.join(DECODE)
        call = rig.call()
        decode.emit(await decode.expect(Decode), [1, 2])
        await call.has_tokens(2)
        decode.die()
        await rig.loses(DECODE)
        other = await rig.join(DECODE)
        leg = await other.expect(Decode)
        assert (leg.attempt, leg.prompt.followed_by(leg.output_ids)) == (2, (*PROMPT, 1, 2))
        other.emit(leg, [3], 2, finish="length")
        assert await call.result() == [1, 2, 3]
        await rig.settle()
        assert rig.relay.counters.num_retries == 1


@pytest.mark.parametrize(("starts_s", "wait_s"), [((), 10.0), ((0.0,), 10.0), ((6.0, 2.5), 24.0), ((300.0,), 60.0)])
async def test_the_wait_follows_what_starts_took(starts_s: tuple[float, ...], wait_s: float) -> None:
    async with relaying(replace(DEFAULTS, node_wait_s=None)) as rig:
        for start_s in starts_s:
            await rig.join(DECODE, start_ms=round(1000 * start_s))
        assert rig.relay.node_wait.timeout_s == wait_s
        rig.relay.node_wait.close()
        assert rig.relay.node_wait.timeout_s == 0


async def test_a_wait_that_was_set_stays() -> None:
    async with relaying(PATIENT) as rig:
        await rig.join(DECODE, start_ms=30_000)
        assert rig.relay.node_wait.timeout_s == 20


@pytest.mark.parametrize("has_prefill", [False, True])
async def test_the_wait_has_an_end(prompts: PromptMaker, has_prefill: bool) -> None:
    async with serving(prompts, IMPATIENT) as server:
        if has_prefill:
            await server.rig.join(PREFILL)
        reply = await post_completion(server, stream=True)
        assert (reply.status, reply.error["code"]) == (503, "no_node")
        await server.rig.settle()


async def test_a_node_that_is_back_in_time_ends_the_wait_for_good() -> None:
    async with relaying(PATIENT) as rig:
        call = rig.call()
        decode = await rig.join(DECODE)
        leg = await decode.expect(Decode)
        rig.relay.stop_waiting()  # would fail what waits
        decode.emit(leg, [1], finish="length")
        assert await call.result() == [1]


async def test_a_client_that_leaves_while_it_waits_reaches_no_node(prompts: PromptMaker) -> None:
    async with serving(prompts, PATIENT) as server:
        async with connected(server) as connection:
            body = json.dumps(completion_body()).encode()
            await connection.send(request_bytes("POST", "/v1/completions", body))
            await server.rig.waits_for_a_node(1)
        await server.rig.waits_for_a_node(0)
        decode: FakeNode = await server.rig.join(DECODE)
        await server.rig.has_heard(decode)
        assert not decode.has(Decode)


async def test_not_more_wait_than_could_run() -> None:
    async with relaying(replace(PATIENT, max_concurrent_requests=1)) as rig:
        waiting = asyncio.create_task(rig.relay.node_wait.for_any_node(MODEL))
        await rig.waits_for_a_node(1)
        with pytest.raises(Overloaded, match="wait for a node"):
            await rig.relay.node_wait.for_any_node(MODEL)
        await rig.join(PREFILL)
        await waiting


async def test_a_shutdown_ends_every_wait(prompts: PromptMaker) -> None:
    async with serving(prompts, PATIENT) as server:
        early = asyncio.create_task(post_completion(server))
        await server.rig.waits_for_a_node(1)
        server.rig.relay.stop_waiting()
        assert (await early).status == 503
        await server.rig.join(PREFILL)
        assert (await post_completion(server)).status == 503
    async with relaying(PATIENT) as rig:
        call = rig.call()
        await rig.has_in_flight(1)
        rig.relay.stop_waiting()
        with pytest.raises(NoNode):
            await call.result()


async def test_nodes_say_how_many_requests_they_have_use_for_and_admission_hears_of_new_ones() -> None:
    async with relaying(PATIENT) as rig:
        seen: list[int] = []
        rig.relay.node_wait.listen(lambda: seen.append(rig.relay.capacity))
        assert rig.relay.capacity == PATIENT.max_concurrent_requests
        first = await rig.join(DECODE, max_num_seqs=3)
        await rig.join(PREFILL, max_num_seqs=100)
        await rig.join(DECODE, max_num_seqs=2)
        assert seen == [12, 12, 20]
        first.leave()
        await rig.loses_all_but(DECODE, 1)
        assert rig.relay.capacity == 8
