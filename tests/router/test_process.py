"""`python -m baton.router` as a process of its own: how it starts, refuses to start, and stops. Most of them are
forked."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from baton.launch.ports import listening
from baton.router.http.access.keys import digest_of
from baton.router.lives import SHORTEST_LIFE_S
from baton.wire.messages.legs import Cancel, Decode
from tests.router.fake_node import FakeNode
from tests.router.http_client import Connection, Reply, parse_reply, request_bytes
from tests.router.router_process import ROOT, forked_router, router_process, run_router

CERTIFICATE = Path(__file__).parent / "http" / "access" / "certificates" / "one.pem"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


async def test_it_says_where_it_is_ready(checkpoint: Path) -> None:
    async with router_process(checkpoint) as router:
        assert router.ready["event"] == "ready"
        assert router.ready["role"] == "router"
        connection = await router.request(stream=False)
        router.node.emit(await router.node.expect(Decode), [70], finish="length")
        assert parse_reply(await connection.to_end()).status == 200
        connection.break_off()


def test_it_starts_without_torch() -> None:
    code = "import baton.router.__main__, sys; sys.exit(bool({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


def test_a_port_in_use_is_one_line(checkpoint: Path, taken_port: int) -> None:
    ended = run_router(str(checkpoint), f"--port={taken_port}", "--control-port=0")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        f"error: cannot listen on 127.0.0.1:{taken_port}: {os.strerror(errno.EADDRINUSE)}; "
        "choose another port with --port"
    ]


def test_a_control_port_in_use_is_one_line(checkpoint: Path, taken_port: int) -> None:
    ended = run_router(str(checkpoint), "--port=0", f"--control-port={taken_port}")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: --control-host, --control-port: cannot listen on 127.0.0.1:{taken_port}")


@pytest.mark.parametrize("arguments", [
    ("./no/such/folder",), ("--prefill-policy=fastest",), ("--port=eighty",), ("--control-host=0.0.0.0",),
    ("--host=0.0.0.0",), ("--listen-fds=0",), ("--control-fd=999",),
    ("--api-key-file=/no/such/file",), ("--ssl-certfile=/no/such/file",),
])  # fmt: skip
def test_settings_that_cannot_be_used_are_one_line(checkpoint: Path, arguments: tuple[str, ...]) -> None:
    model = () if not arguments[0].startswith("--") else (str(checkpoint),)
    ended = run_router(*model, "--control-port=0", *([] if "--port" in arguments[0] else ["--port=0"]), *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")


async def test_sigterm_lets_a_stream_finish(checkpoint: Path) -> None:
    async with forked_router(checkpoint) as router:
        connection = await router.request()
        leg = await router.node.expect(Decode)
        router.node.emit(leg, [70])
        await connection.until(b"data: ")
        await router.stop()
        late = await router.request()
        refused: Reply = parse_reply(await late.to_end())
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        late.break_off()
        router.node.emit(leg, [70, 70], 0, finish="length")
        assert len(parse_reply(await connection.to_end()).chunks) >= 2
        connection.break_off()
        assert await router.ended(10.0) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_router_stops_at_once(checkpoint: Path, number: signal.Signals) -> None:
    async with forked_router(checkpoint) as router:
        router.process.send_signal(number)
        assert await router.ended(10.0) == 0


async def test_a_second_signal_breaks_streams_off(checkpoint: Path) -> None:
    async with forked_router(checkpoint) as router:
        connection = await router.request()
        router.node.emit(await router.node.expect(Decode), [70])
        await connection.until(b"data: ")
        await router.stop()
        router.process.send_signal(signal.SIGTERM)
        reply = parse_reply(await connection.to_end())
        connection.break_off()
        assert not reply.is_whole
        assert json.loads(reply.events[-1])["error"]["code"] == "overloaded"
        await router.node.expect(Cancel)
        assert await router.ended(10.0) == 0  # not after the 30 s that running requests would get


async def test_the_shutdown_deadline_breaks_streams_off(checkpoint: Path) -> None:
    async with forked_router(checkpoint, "--shutdown-timeout-s=0.3") as router:
        connection = await router.request()
        router.node.emit(await router.node.expect(Decode), [70])
        await connection.until(b"data: ")
        router.process.send_signal(signal.SIGTERM)
        assert not parse_reply(await connection.to_end()).is_whole
        connection.break_off()
        assert await router.ended(10.0) == 0


async def _answer(node: FakeNode) -> None:
    node.emit(await node.expect(Decode), [70], finish="length")


async def test_who_connects_while_the_router_is_away_waits_for_the_next_one(checkpoint: Path) -> None:
    with listening("127.0.0.1", 0, "--port") as http, listening("127.0.0.1", 0, "--control-port") as control:
        fds = (*http.fds, *control.fds)
        flags = (f"--listen-fds={http.fds[0]}", f"--control-fd={control.fds[0]}")
        async with router_process(checkpoint, *flags, fds=fds) as router:
            assert urlsplit(router.ready["address"]).port == http.port
            assert urlsplit(router.ready["control_address"]).port == control.port
            router.process.kill()
            await router.ended(60.0)
            waiting = await router.request(stream=False)
            async with router_process(checkpoint, *flags, fds=fds) as successor:
                await router.node.join()
                # the request may have found either of the two nodes
                answers = [asyncio.create_task(_answer(node)) for node in (router.node, successor.node)]
                assert parse_reply(await waiting.to_end()).status == 200
                for answer in answers:
                    answer.cancel()
                waiting.break_off()


async def test_a_router_with_inherited_sockets_begins_another_life_when_one_ends(
    checkpoint: Path, tmp_path: Path
) -> None:
    with listening("127.0.0.1", 0, "--port") as http, listening("127.0.0.1", 0, "--control-port") as control:
        flags = [f"--listen-fds={http.fds[0]}", f"--control-fd={control.fds[0]}"]
        flags += ["--resumable-streams-s=60", f"--journal-dir={tmp_path / 'streams'}"]
        async with router_process(checkpoint, *flags, fds=(*http.fds, *control.fds)) as router:
            await asyncio.sleep(SHORTEST_LIFE_S)
            connection = await router.request(max_tokens=2)
            router.node.emit(await router.node.expect(Decode), [70])
            (event, *_) = (await connection.until(b"\n\n")).partition(b"\r\n\r\n")[2].splitlines()[1:]
            (life,) = psutil.Process(router.process.pid).children()
            if sys.platform == "linux":
                assert [child.cmdline()[-1] for child in life.children()] == ["60"], "the guard of its interpreter"
            life.kill()
            await connection.to_end()
            again = await router.request(max_tokens=2, last_event_id=event.removeprefix(b"id: ").decode())
            await router.node.join()
            leg = await router.node.expect(Decode)
            assert leg.output_ids == (70,)
            router.node.emit(leg, [71], finish="length")
            assert b"data: [DONE]" in await again.to_end()
            for each in (connection, again):
                each.break_off()
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended(60.0) == 0


async def test_sighup_reads_the_keys_again(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entries = [f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n' for name in ("alice", "bob")]
    path.write_text(entries[0])
    async with forked_router(checkpoint, f"--api-key-file={path}") as router:
        assert [await router.models(name) for name in ("alice", "bob", "")] == [200, 401, 401]
        path.write_text(entries[1])
        router.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while await router.models("bob") != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await router.models("alice") == 401


async def test_it_serves_https_and_keeps_an_audit_log(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    async with forked_router(checkpoint, f"--ssl-certfile={CERTIFICATE}", f"--audit-log={path}") as router:
        parts = urlsplit(router.ready["address"])
        assert parts.scheme == "https"
        trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
        connection = Connection(*await asyncio.open_connection(parts.hostname, parts.port, ssl=trusting))
        await connection.send(request_bytes("GET", "/v1/models"))
        assert parse_reply(await connection.to_end()).status == 200
        connection.break_off()
        router.process.send_signal(signal.SIGTERM)
        assert await router.ended(10.0) == 0
    assert [json.loads(line)["route"] for line in path.read_text().splitlines()] == ["/v1/models"]


async def test_a_shutdown_does_not_wait_for_nodes(checkpoint: Path) -> None:
    async with forked_router(checkpoint) as router:
        running = await router.request(stream=False)
        await router.node.expect(Decode)
        router.node.die()
        await router.is_not_ready()
        router.process.send_signal(signal.SIGTERM)
        reply = parse_reply(await running.to_end())
        assert (reply.status, reply.error["code"]) == (503, "no_node")
        running.break_off()
        assert await router.ended(10.0) == 0
