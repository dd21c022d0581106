"""Clients that leave: in each phase of a request, in each way, and at every place where its handler waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import socket
import struct
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from baton.router.http.admission.admission import AdmissionSettings, Demand, Permit
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.resume.logs import Memory
from baton.router.http.resume.streams import Streams
from baton.router.http.serving.server import Handler
from baton.router.requests.flight import Flight
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from tests.router.crowds import Paced
from tests.router.fake_node import PATIENCE_S, FakeNode
from tests.router.http_client import Connection, completion_body, connected, parse_reply, request_bytes
from tests.router.rig import DEFAULTS, Rig, Server, serving

PATH = "/v1/completions"
ANSWER = [70, 71, 72]
ONE_AT_A_TIME = AdmissionSettings(1, max_queued_requests=4, max_queued_tokens=10_000, max_queue_s=30)
SETTINGS = replace(DEFAULTS, node_wait_s=30.0, max_concurrent_requests=64)


def request(**members: Any) -> bytes:
    body = json.dumps(completion_body(max_tokens=len(ANSWER), **members)).encode()
    return request_bytes("POST", PATH, body)


def close(connection: Connection) -> None:
    connection.writer.close()


def reset(connection: Connection) -> None:
    found = connection.writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.writer.transport.abort()


def half_close(connection: Connection) -> None:
    connection.writer.write_eof()


class Phase:
    """A request that has come so far. `nodes` are those that it may have legs at."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self.server, self.connection = server, connection
        self.nodes: list[FakeNode] = []
        self._permit: Permit | None = None
        self._leg: Decode | None = None

    async def reach(self, name: str) -> None:
        """Come to the phase of that name."""
        raw = request(stream=True)
        if name == "headers":
            await self.connection.send(raw[:40])
        elif name == "body":
            await self.connection.send(raw[:-9])
        if name not in ("headers", "body"):
            await self._wait_somewhere(name, raw)

    async def _wait_somewhere(self, name: str, raw: bytes) -> None:
        rig = self.server.rig
        if name != "node":
            self.nodes = [await rig.join(role) for role in (PREFILL, DECODE)]
        if name == "queue":
            self._permit = await self.server.endpoints.admission.admit(Demand(None, 1, 1))
        await self.connection.send(raw)
        if name == "node":
            await rig.waits_for_a_node(1)
        elif name == "queue":
            await becomes_true(lambda: self.server.endpoints.admission.num_waiting == 1)
        else:
            await self._generate(name)

    async def _generate(self, name: str) -> None:
        prefill, decode = self.nodes
        first, leg = await prefill.expect(Prefill), await decode.expect(Decode)
        self._leg = leg
        if name != "prefill":
            prefill.emit(first, ANSWER[:1])
            await self.connection.until(b"data: ")
        if name == "decoding":
            decode.emit(leg, ANSWER[:2], 0)
            await self.connection.until(b"data: ", 2)
        if name == "unread":
            self.connection.pause()
            for index in range(60):  # more than the buffers on the way hold
                decode.emit(leg, [70] * 2000, index * 2000)
            await rig_has_heard(self.server.rig, decode)

    async def go_on(self) -> None:
        """Let a request go on whose client waits for its answer."""
        if self._permit is not None:
            self._permit.close(0, 0)
        if not self.nodes:
            self.nodes = [await self.server.rig.join(DECODE)]
        decode = self.nodes[-1]
        leg = self._leg if self._leg is not None else await decode.expect(Decode)
        decode.emit(leg, ANSWER, 0, "length")

    async def is_over(self) -> None:
        """Wait until nothing of the request is left."""
        if self._permit is not None:
            self._permit.close(0, 0)
        await nothing_is_left(self.server)


async def rig_has_heard(rig: Rig, node: FakeNode) -> None:
    await rig.has_heard(node)


async def becomes_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def nothing_is_left(server: Server) -> None:
    """Wait for that: at the router, and at decode nodes, which have been told."""
    rig, admission, wait = server.rig, server.endpoints.admission, server.rig.relay.node_wait
    await rig.settle()
    await becomes_true(lambda: not (admission.num_running or admission.num_waiting or wait.num_waiting))
    await becomes_true(lambda: not any(node.live for node in rig.nodes if node.hello.role == DECODE))
    assert wait.num_paused == 0


PHASES = ("headers", "body", "node", "queue", "prefill", "handoff", "decoding", "unread")
"""Of these `handoff`: the prefill node is done, and the decode node has not said anything."""
ENDS_UNWRITTEN = ("node", "queue", "prefill")


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("name", PHASES)
async def test_whoever_leaves_in_any_phase_leaves_nothing_behind(
    prompts: PromptMaker, name: str, leave: Callable[[Connection], None]
) -> None:
    async with (
        serving(prompts, SETTINGS, queue=ONE_AT_A_TIME) as server,
        connected(server, buffer_bytes=4096) as connection,
    ):
        phase = Phase(server, connection)
        await phase.reach(name)
        assert any(node.live for node in phase.nodes) == (name not in ("headers", "body", "node", "queue"))
        leave(connection)
        if leave is half_close and name in ENDS_UNWRITTEN:  # it may still wait for its answer, and gets it
            await phase.go_on()
            raw = await connection.to_end()
            assert parse_reply(raw[raw.index(b"HTTP/1.1 200") :]).events[-1] == "[DONE]"
        elif leave is half_close and name == "unread":  # what was written before has to leave first
            connection.resume()
            await connection.to_end()
        elif name == "prefill":
            await becomes_true(lambda: not any(node.live for node in phase.nodes))
        await phase.is_over()


class Cutter:
    """A handler whose task is cancelled when it waits for the `at`-th time; 0: never."""

    def __init__(self, handler: Handler) -> None:
        self.at = self.num_waits = 0
        self._handler = handler

    async def __call__(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._count(self._handler(http))  # type: ignore[arg-type]

    @types.coroutine
    def _count(self, handling: Coroutine[Any, None, web.StreamResponse]) -> Generator[Any, None, web.StreamResponse]:
        self.num_waits, thrown = 0, None
        while True:
            try:
                awaited = handling.send(None) if thrown is None else handling.throw(thrown)
            except StopIteration as end:
                found: web.StreamResponse = end.value
                return found
            self.num_waits += 1
            if self.num_waits == self.at and (task := asyncio.current_task()) is not None:
                task.cancel()
            try:
                thrown = None
                yield awaited
            except BaseException as error:
                thrown = error


@asynccontextmanager
async def cut_server(prompts: PromptMaker, streams: Streams | None) -> AsyncIterator[tuple[Server, Cutter]]:
    async with serving(prompts, SETTINGS, queue=ONE_AT_A_TIME, streams=streams) as server:
        pace = Paced(await server.rig.join(DECODE), step_s=0.001)
        inner = server.http._runner.server
        assert inner is not None
        cutter = inner.request_handler = Cutter(inner.request_handler)
        yield server, cutter
        pace.close()


async def _ask(server: Server, cutter: Cutter, members: dict[str, Any], *, is_queued: bool) -> bytes:
    cutter.num_waits = 0
    admission = server.endpoints.admission
    permit = await admission.admit(Demand(None, 1, 1)) if is_queued else None
    async with connected(server) as connection:
        raw = request(**members)
        await connection.send(raw[:-9])
        await becomes_true(lambda: cutter.num_waits > 0)  # for the rest of the body
        await connection.send(raw[-9:])
        if permit is not None:
            asyncio.get_running_loop().call_later(0.005, permit.close, 0, 0)
        with contextlib.suppress(ConnectionError):
            await connection.to_end()
        if permit is not None:
            permit.close(0, 0)
        return bytes(connection.received)


@pytest.mark.parametrize("kind", ["stream", "whole", "queued", "resumable"])
async def test_a_request_that_is_cancelled_wherever_it_waits_leaves_nothing_behind(
    prompts: PromptMaker, kind: str
) -> None:
    members = {"stream": kind in ("stream", "resumable")}
    streams = Streams(Memory(), 60.0) if kind == "resumable" else None
    async with cut_server(prompts, streams) as (server, cutter):
        tasks = len(asyncio.all_tasks())
        raw = b""
        for cutter.at in itertools.count(1):
            raw = await _ask(server, cutter, members, is_queued=kind == "queued")
            await nothing_is_left(server)
            await becomes_true(lambda: len(asyncio.all_tasks()) == tasks)
            if cutter.num_waits < cutter.at:
                break
        assert cutter.at > 2  # the body and the answer; a slow machine may have all of that at once
        assert parse_reply(raw).is_whole
        assert server.rig.relay.counters.num_failed == 0
        gc.collect()
        assert not any(type(found) is Flight for found in gc.get_objects())
