"""All bad inputs beside 32 good streams, which come out byte for byte as they do alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.serving.limits import HttpLimits
from baton.wire.messages.legs import Cancel, Decode
from tests.router import test_bad_requests as fields
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.good_streams import (
    CHAT,
    COMPLETIONS,
    HELD_SEEDS,
    NUM_STREAMS,
    STREAMS,
    BadInput,
    HoldingNodes,
    run_beside,
)
from tests.router.http.serving import test_http_layer as http_layer
from tests.router.http_client import Connection, Reply, completion_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import DEFAULTS, Server, serving

KEY = {"authorization": "Bearer key-of-alice"}
SPARE_SEEDS = HELD_SEEDS[NUM_STREAMS:]
OTHER_ADDRESS = "127.0.0.2"
MAX_CONNECTIONS = 150
HTTP_LIMITS = replace(http_layer.LIMITS, header_s=0.8, body_stall_s=0.5)
LIFE_LIMITS = HttpLimits(header_s=120.0, body_s=0.5, write_s=0.5, max_connections_per_address=MAX_CONNECTIONS)
"""On a busy machine it takes a while to open as many connections as are allowed, and all have to be there together."""


def _mismatch(reply: Reply, status: int, code: str | None = None, param: str | None = None) -> str | None:
    if reply.status == status == 200:
        return None
    found = (reply.status, reply.error["code"] if code else None, reply.error["param"] if param else None)
    return None if found == (status, code, param) else f"{reply.status} {reply.body!r:.300}"


def _http_input(case: http_layer.Case) -> BadInput:
    async def send(server: Server, _: HoldingNodes) -> str | None:
        return http_layer.fault_of(await http_layer.answer_to(server, case), case)

    return send


def _request(
    path: str, body: bytes, status: int, code: str | None = None, param: str | None = None, **headers: str
) -> BadInput:
    async def send(server: Server, _: HoldingNodes) -> str | None:
        return _mismatch(await fetch(server, "POST", path, body, headers), status, code, param)

    return send


def _endless(headers: dict[str, str]) -> BadInput:
    """Headers of a megabyte. The answer to their beginning may be lost when the connection closes on the rest."""

    async def send(server: Server, _: HoldingNodes) -> str | None:
        async with connected(server) as connection:
            with contextlib.suppress(ConnectionError):
                await connection.send(request_bytes("POST", CHAT, fields.GOOD, headers))
                await connection.to_end()
            return _mismatch(parse_reply(bytes(connection.received)), 431) if connection.received else None

    return send


def _bad_http() -> dict[str, BadInput]:
    return {name: _http_input(case) for name, case in http_layer.CASES.items()}


def _bad_fields() -> dict[str, BadInput]:
    found: dict[str, BadInput] = {}
    for name, raw in fields.RAW.items():
        found[name] = _request(CHAT, raw.body, raw.status, raw.code, **dict(raw.headers))
    for number, (case, path, members, param) in enumerate([*fields.FIELDS, *fields.MORE_FIELDS]):
        found[f"{case}-{number}"] = _request(path, fields.changed_body(path, members), 400, param=param)
    for number, (case, path, accepted) in enumerate(fields.ACCEPTED):
        found[f"{case} accepted {number}"] = _request(path, fields.changed_body(path, accepted), 200)
    found["5 byte order mark"] = _request(CHAT, b"\xef\xbb\xbf" + fields.GOOD, 200)
    found["30 unknown model"] = _request(CHAT, fields.changed_body(CHAT, {"model": "gpt-0"}), 404, "model_not_found")
    return found


def _bad_clients() -> dict[str, BadInput]:
    found: dict[str, BadInput] = {}
    for key in ("", "Bearer key-of-bob", "Bearer", "Bearer    ", "Basic a2V5", "Bearer " + "k" * 8000):
        found[f"25 {key:.12}"] = _request(CHAT, fields.GOOD, 401, "invalid_api_key", authorization=key)
    found["25 key of 1 MB"] = _endless({"authorization": "Bearer " + "k" * 2**20})
    for path in fields.UNKNOWN_PATHS:
        found[f"24 {path}"] = _request(path, fields.GOOD, 404, "not_found", **KEY)
    return found | {
        "20 a body in drops": _send_in_drops,
        "27 a second request at once, then half closed": _ask_twice,
        "28 too many connections": _open_too_many,
        "70 leaves before its headers are whole": _leave_early,
        "70 leaves before the first token": _leave_without_a_token,
        "70 leaves in the middle": _leave_in_the_middle,
        "71 reads nothing": _read_nothing,
        "72 one id twice": _use_an_id_twice,
        "72 id of 1 MB": _endless({**KEY, "x-request-id": "i" * 2**20}),
        "72 id with a line break": _request(CHAT, fields.GOOD, 400, **KEY, **{"x-request-id": "a\rx-b: c"}),
    }


async def _send_in_drops(server: Server, _: HoldingNodes) -> str | None:
    async with connected(server) as connection:
        await connection.send(request_bytes("POST", CHAT, headers={**KEY, "content-length": "1000"}))
        while not connection.received:
            with contextlib.suppress(ConnectionError):
                await connection.send(b" ")
            with contextlib.suppress(TimeoutError):
                connection.received += await asyncio.wait_for(connection.reader.read(65536), 0.05)
        return _mismatch(parse_reply(bytes(connection.received)), 408, "request_timeout")


async def _ask_twice(server: Server, _: HoldingNodes) -> str | None:
    async with connected(server) as connection:
        first = request_bytes("POST", CHAT, fields.GOOD, KEY, is_last=False)
        await connection.send(first + request_bytes("POST", CHAT, fields.GOOD, KEY))
        connection.writer.write_eof()
        raw = await connection.to_end()
        return None if raw.count(b"HTTP/1.1 200 OK") == 2 else f"{raw!r:.300}"


async def _open_too_many(server: Server, _: HoldingNodes) -> str | None:
    async with contextlib.AsyncExitStack() as stack:
        held = [
            await stack.enter_async_context(connected(server, source=OTHER_ADDRESS)) for _ in range(MAX_CONNECTIONS)
        ]
        refused = await stack.enter_async_context(connected(server, source=OTHER_ADDRESS))
        fault = _mismatch(parse_reply(await refused.until(b"}}")), 429)
        await held[0].send(request_bytes("POST", CHAT, fields.GOOD, KEY))
        return fault or _mismatch(parse_reply(await held[0].to_end()), 200)


async def _leave_early(server: Server, _: HoldingNodes) -> None:
    async with connected(server) as connection:
        await connection.send(request_bytes("POST", CHAT, fields.GOOD, KEY)[:70])
        connection.break_off()


async def _leave_without_a_token(server: Server, nodes: HoldingNodes) -> None:
    async with _held(server, nodes, SPARE_SEEDS[0]) as (connection, node, leg):
        connection.break_off()
        await node.expect(Cancel, handoff_id=leg.handoff_id)


async def _leave_in_the_middle(server: Server, nodes: HoldingNodes) -> None:
    async with _held(server, nodes, SPARE_SEEDS[1]) as (connection, node, leg):
        node.emit(leg, [70])
        await connection.until(b"data: ")
        connection.break_off()
        await node.expect(Cancel, handoff_id=leg.handoff_id)


async def _read_nothing(server: Server, nodes: HoldingNodes) -> str | None:
    async with _held(server, nodes, SPARE_SEEDS[2]) as (connection, node, leg):
        connection.pause()
        for index in range(80):  # more than the buffers on the way hold
            node.emit(leg, [70] * 2000, index * 2000)
        await node.expect(Cancel, handoff_id=leg.handoff_id)
        connection.resume()
        with contextlib.suppress(ConnectionError):
            await connection.to_end()
        return "the answer looks whole" if parse_reply(bytes(connection.received)).is_whole else None


@asynccontextmanager
async def _held(
    server: Server, nodes: HoldingNodes, seed: int
) -> AsyncIterator[tuple[Connection, FakeNode, LegMessage]]:
    """A stream whose leg waits at the decode node."""
    async with connected(server, buffer_bytes=4096) as connection:
        body = json.dumps(completion_body(stream=True, seed=seed)).encode()
        await connection.send(request_bytes("POST", COMPLETIONS, body, KEY))
        yield connection, *await nodes.leg(Decode, seed)


async def _use_an_id_twice(server: Server, _: HoldingNodes) -> str | None:
    headers = {**KEY, "x-request-id": "the-same"}
    replies = await asyncio.gather(*[fetch(server, "POST", CHAT, fields.GOOD, headers) for _ in range(2)])
    found = [(reply.status, reply.headers["x-request-id"]) for reply in replies]
    return None if found == [(200, "the-same")] * 2 else str(found)


async def _run(
    prompts: PromptMaker, bad: dict[str, BadInput], limits: HttpLimits, guard: Guard | None = None
) -> dict[int, bytes]:
    """What the client of each good stream got. All `bad` inputs are answered as they should be."""
    settings = replace(DEFAULTS, max_concurrent_requests=1000, request_timeout_s=60.0)
    async with serving(prompts, settings, limits, guard=guard) as server:
        nodes = HoldingNodes(prompts.tokenizer, answering([5], "length"))
        await server.rig.pair(nodes.script)
        received, faults = await run_beside(server, nodes, bad, KEY)
    assert faults == {}
    return {stream.number: each for stream, each in zip(STREAMS, received, strict=True)}


@pytest.fixture(scope="module")
def alone(prompts: PromptMaker) -> dict[int, bytes]:
    """What the clients get when there is nobody else."""
    received = asyncio.run(_run(prompts, {}, HttpLimits()))
    assert all(each.startswith(b"HTTP/1.1 200 OK") and each.endswith(b"\r\n0\r\n\r\n") for each in received.values())
    assert len(set(received.values())) == NUM_STREAMS
    return received


@pytest.mark.parametrize(
    ("bad", "limits", "has_keys"),
    [(_bad_http(), HTTP_LIMITS, False), (_bad_fields(), fields.LIMITS, False), (_bad_clients(), LIFE_LIMITS, True)],
    ids=["http", "fields", "clients"],
)
async def test_bad_inputs_change_no_byte_of_32_streams(
    prompts: PromptMaker,
    tmp_path: Path,
    alone: dict[int, bytes],
    bad: dict[str, BadInput],
    limits: HttpLimits,
    has_keys: bool,
) -> None:
    key_file = tmp_path / "keys.toml"
    key_file.write_text(f'[alice]\nsha256 = "{digest_of("key-of-alice").hex()}"\n')
    beside = await _run(prompts, bad, limits, Guard(key_file, "", b"s" * 32) if has_keys else None)
    assert [number for number in alone if beside[number] != alone[number]] == []
