"""Admission as clients meet it: the queue over HTTP, limits of tokens, who shares a prefix cache, and the metrics."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.hashing import block_hashes
from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.admission.admission import AdmissionSettings
from baton.router.http.openai.prompts import PromptMaker
from baton.router.routing.policies import Prefix
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import LAYOUT, FakeNode, LegMessage, Script, answering
from tests.router.http_client import Reply, completion_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import DEFAULTS, MODEL, Server, serving

ONE_AT_A_TIME = AdmissionSettings(1, max_queued_requests=2, max_queued_tokens=10_000, max_queue_s=30)
COMPLETIONS = "/v1/completions"


def _guard(tmp_path: Path, **entries: str) -> Guard:
    """Keys named like the members; each is "key-of-" and its name."""
    path = tmp_path / "keys.toml"
    lines = [f'[{name}]\nsha256 = "{digest_of(f"key-of-{name}").hex()}"\n{entry}\n' for name, entry in entries.items()]
    path.write_text("".join(lines))
    return Guard(path, "", b"s" * 32)


def _headers(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"} if name else {}


async def _post(server: Server, name: str = "", **members: object) -> Reply:
    return await fetch(server, "POST", COMPLETIONS, json.dumps(completion_body(**members)).encode(), _headers(name))


async def _has_waiting(server: Server, number: int) -> None:
    async with asyncio.timeout(30):
        while server.endpoints.admission.num_waiting != number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _samples(server: Server, name: str = "") -> dict[tuple[str, ...], float]:
    text = (await fetch(server, "GET", "/metrics", headers=_headers(name))).body.decode()
    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_run_one_after_the_other_and_the_queue_has_an_end(prompts: PromptMaker, stream: bool) -> None:
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=1), queue=ONE_AT_A_TIME) as server:
        decode = await server.rig.join(DECODE)
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(_post(server, stream=stream)))
            await _has_waiting(server, number)
        assert (await _samples(server))["baton:num_requests_queued",] == 2
        refused = await _post(server, stream=stream)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        for _ in tasks:
            decode.emit(await decode.expect(Decode), [5], finish="length")
        assert {(await task).status for task in tasks} == {200}
        samples = await _samples(server)
        assert samples["baton:requests_rejected_total", "queue_full"] == 1
        assert samples["baton:admission_wait_seconds_count", MODEL] == 3
        await server.rig.settle()
        assert server.endpoints.admission.num_running == 0


async def test_a_client_that_leaves_the_queue_never_reaches_a_node(prompts: PromptMaker) -> None:
    async with (
        serving(prompts, replace(DEFAULTS, max_concurrent_requests=1), queue=ONE_AT_A_TIME) as server,
        AsyncExitStack() as stack,
    ):
        decode = await server.rig.join(DECODE)
        running = asyncio.create_task(_post(server))
        leg = await decode.expect(Decode)
        connection = await stack.enter_async_context(connected(server))
        body = json.dumps(completion_body(stream=True)).encode()
        await connection.send(request_bytes("POST", COMPLETIONS, body))
        await _has_waiting(server, 1)
        connection.break_off()
        await _has_waiting(server, 0)
        decode.emit(leg, [5], finish="length")
        assert (await running).status == 200
        await server.rig.settle()
        assert not decode.has(Decode)
        assert server.endpoints.admission.num_running == 0


async def test_a_lower_priority_number_is_served_earlier(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=1), queue=ONE_AT_A_TIME) as server:
        decode = await server.rig.join(DECODE)
        tasks = [asyncio.create_task(_post(server, max_tokens=1))]
        leg = await decode.expect(Decode)
        for number, (priority, max_tokens) in enumerate([(5, 2), (-5, 3)], start=1):
            tasks.append(asyncio.create_task(_post(server, max_tokens=max_tokens, priority=priority)))
            await _has_waiting(server, number)
        order = []
        for _ in tasks:
            order.append(leg.params.max_tokens)
            decode.emit(leg, [5], finish="length")
            leg = await decode.expect(Decode) if len(order) < len(tasks) else leg
        assert order == [1, 3, 2]
        assert {(await task).status for task in tasks} == {200}


async def test_tokens_of_a_key_are_limited_by_what_it_used(prompts: PromptMaker, tmp_path: Path) -> None:
    guard = _guard(tmp_path, alice="tokens_per_minute = 200", bob="")
    async with serving(prompts, guard=guard) as server:
        decode = await server.rig.join(DECODE)
        prompt = list(range(40, 60))
        running = asyncio.create_task(_post(server, "alice", prompt=prompt, max_tokens=100))
        leg = await decode.expect(Decode)
        refused = await _post(server, "alice", prompt=prompt, max_tokens=100)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert 10 <= int(refused.headers["retry-after"]) <= 12
        assert refused.headers["x-ratelimit-limit-tokens"] == "200"
        assert 80 <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 90
        decode.emit(leg, [5], finish="length")
        assert (await running).status == 200
        decode.script = answering([5], "length")
        assert (await _post(server, "alice", prompt=prompt, max_tokens=100)).status == 200
        never = await _post(server, "alice", prompt=prompt, max_tokens=181)
        assert (never.status, never.error["code"]) == (400, "request_too_large")
        samples = await _samples(server, "bob")
        assert samples["baton:key_prompt_tokens_total", "alice"] == 40
        assert samples["baton:key_generation_tokens_total", "alice"] == 2
        assert samples["baton:key_requests_total", "alice"] == 4
        assert samples["baton:key_requests_total", "bob"] == 0
        assert samples["baton:requests_rejected_total", "tokens_per_minute"] == 1


def _caching(pool: BlockPool) -> Script:
    """A node that computes one token, caches the blocks of prompts as every node does, and tells of them."""

    def script(node: FakeNode, leg: LegMessage) -> None:
        hashes = block_hashes(node.hello.fingerprint, leg.prompt, (), LAYOUT.block_size)
        num_known = len(pool.lookup(hashes))
        block_ids = pool.allocate(len(hashes) - num_known)
        for block_id, block_hash in zip(block_ids, hashes[num_known:], strict=True):
            pool.publish(block_id, block_hash)
        pool.release(block_ids)
        node.report_cache(b"".join(hashes))
        node.emit(leg, [5], finish="length", cached=num_known * LAYOUT.block_size)

    return script


async def test_a_key_gets_nothing_from_the_cache_of_another(prompts: PromptMaker, tmp_path: Path) -> None:
    guard = _guard(tmp_path, alice='group = "research"', bob='group = "research"', carol="", dave="")
    salt_of_alice = next(each.cache_root for each in guard.identities if each.name == "alice").hex()
    async with serving(prompts, guard=guard) as server:
        await server.rig.join(DECODE, _caching(BlockPool(64)))

        async def num_cached(name: str, **members: object) -> int:
            reply = await _post(server, name, prompt=[*range(40, 54)], **members)
            return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await num_cached(name) for name in ("alice", "carol", "dave")] == [0, 0, 0]
        assert [await num_cached(name) for name in ("alice", "bob", "carol", "dave")] == [12, 12, 12, 12]
        for salt in ("x", "alice", "research", salt_of_alice):  # what a client chooses leads to no other key's cache
            assert [await num_cached(name, cache_salt=salt) for name in ("alice", "carol", "dave")] == [0, 0, 0]
            assert [await num_cached(name, cache_salt=salt) for name in ("bob", "carol")] == [12, 12]


async def _seen_by_bob(prompts: PromptMaker, guard: Guard, *, alice_asks: bool) -> tuple[int, int]:
    """What could tell bob whether alice has sent his prompt: the number of the node that he is sent to, and how many
    tokens of the prompt it need not compute. Alice's goes to the second node, as the first one is busy with carol's."""
    async with serving(prompts, guard=guard, decode_policy=Prefix()) as server:
        first, second = await server.rig.join(DECODE), await server.rig.join(DECODE, _caching(BlockPool(64)))
        busy = asyncio.create_task(_post(server, "carol", prompt=[*range(80, 94)]))
        leg = await first.expect(Decode)
        if alice_asks:
            assert (await _post(server, "alice", prompt=[*range(40, 54)])).status == 200
            await server.rig.has_heard(second)
        first.emit(leg, [5], finish="length")
        assert (await busy).status == 200
        await server.rig.settle()
        first.script = _caching(BlockPool(64))
        while second.has(Decode):
            await second.expect(Decode)
        reply = await _post(server, "bob", prompt=[*range(40, 54)])
        return int(second.has(Decode)), reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_key_cannot_tell_whether_another_has_sent_its_prompt(prompts: PromptMaker, tmp_path: Path) -> None:
    alone = _guard(tmp_path, alice="", bob="", carol="")
    assert await _seen_by_bob(prompts, alone, alice_asks=True) == (0, 0)
    assert await _seen_by_bob(prompts, alone, alice_asks=False) == (0, 0)
    shared = _guard(tmp_path, alice='group = "one"', bob='group = "one"', carol="")
    assert await _seen_by_bob(prompts, shared, alice_asks=True) == (1, 12)  # this is what would give it away


async def test_without_keys_legs_have_no_salt(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        decode = await server.rig.join(DECODE, answering([5], "length"))
        assert (await _post(server)).status == 200
        assert (await decode.expect(Decode)).prompt.cache_salt == b""


async def test_a_shutdown_answers_those_who_wait(prompts: PromptMaker) -> None:
    async with serving(prompts, replace(DEFAULTS, max_concurrent_requests=1), queue=ONE_AT_A_TIME) as server:
        decode = await server.rig.join(DECODE)
        running = asyncio.create_task(_post(server))
        leg = await decode.expect(Decode)
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", COMPLETIONS, json.dumps(completion_body()).encode()))
            await _has_waiting(server, 1)
            server.endpoints.admission.close()
            reply = parse_reply(await connection.to_end())
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        decode.emit(leg, [5], finish="length")
        assert (await running).status == 200
