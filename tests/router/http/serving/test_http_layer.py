"""The HTTP layer by hand, over a raw socket: what a client is told that sends too much, too slowly, or no HTTP at all.

The numbers are those of the table of bad inputs. Each case runs under both event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp.http_parser
import aiohttp.web_protocol
import pytest
import uvloop

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.serving.limits import HttpLimits
from baton.wire.messages.legs import Cancel, Decode
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import FakeNode, LegMessage
from tests.router.http_client import Connection, chat_body, connected, fetch, parse_reply, request_bytes
from tests.router.rig import Server, serving

CHAT = "/v1/chat/completions"
CANARY = b"canary-4711"
LIMITS = HttpLimits(
    max_body_bytes=2**16, header_s=2.0, body_stall_s=0.3, body_s=0.8, linger_s=0.2, max_connections_per_address=100
)
GOOD = json.dumps(chat_body()).encode()
HOST = b"Host: test\r\n"
JSON = b"Content-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent, and the status that answers it; None: the connection is closed without an answer."""

    sent: bytes
    status: int | None
    code: str | None = None


def _post(headers: bytes, body: bytes = b"") -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + JSON + headers + b"\r\n" + body


def _sized(body: bytes, headers: bytes = b"") -> bytes:
    return _post(b"Content-Length: %d\r\n" % len(body) + headers, body)


def _deflated(body: bytes) -> bytes:
    return zlib.compress(body)


CASES = {
    "1 invalid JSON": Case(_sized(b'{"model": "canary-4711'), 400, "invalid_json"),
    "2 empty body": Case(_sized(b""), 400, "invalid_json"),
    "2 no body": Case(_post(b""), 400, "invalid_json"),
    "3 array": Case(_sized(b'["canary-4711"]'), 400, "invalid_json"),
    "3 string": Case(_sized(b'"canary-4711"'), 400, "invalid_json"),
    "3 number": Case(_sized(b"4711"), 400, "invalid_json"),
    "4 invalid UTF-8": Case(_sized(b'{"model": "canary-4711\xff"}'), 400, "invalid_json"),
    "7 unknown charset": Case(_sized(GOOD).replace(b"/json\r", b"/json; charset=bogus\r"), 415),
    "8 duplicate keys": Case(_sized(b'{"model": "a", "model": "canary-4711"}'), 400, "invalid_json"),
    "9 NaN": Case(_sized(b'{"model": "m", "messages": [], "temperature": NaN}'), 400, "invalid_json"),
    "10 integer of 5000 digits": Case(_sized(b'{"n": ' + b"9" * 5000 + b"}"), 400, "invalid_json"),
    "11 deep nesting": Case(_sized(b'{"a":' + b"[" * 20_000), 400, "invalid_json"),
    "12 lone surrogate": Case(_sized(b'{"model": "\\ud800canary-4711"}'), 400, "invalid_json"),
    "14 declared length over the limit": Case(_post(b"Content-Length: 65537\r\n"), 413, "request_too_large"),
    "14 declared length of 5000 digits": Case(_post(b"Content-Length: " + b"9" * 5000 + b"\r\n"), 400),
    "15 chunked body without end": Case(_post(b"Transfer-Encoding: chunked\r\n", b"5\r\n     \r\n"), 408),
    "15 chunked body over the limit": Case(
        _post(b"Transfer-Encoding: chunked\r\n", b"8000\r\n" + b" " * 0x8000 + b"\r\n" + b"9000\r\n" + b" " * 0x9000),
        413,
    ),
    "16 gzip bomb": Case(_sized(gzip.compress(b" " * 2**22), b"Content-Encoding: gzip\r\n"), 413),
    "16 deflate bomb": Case(_sized(_deflated(b" " * 2**22), b"Content-Encoding: deflate\r\n"), 413),
    "16 gzip cut short": Case(_sized(gzip.compress(GOOD)[:-8], b"Content-Encoding: gzip\r\n"), 400),
    "16 gzip with something behind it": Case(_sized(gzip.compress(GOOD) + CANARY, b"Content-Encoding: gzip\r\n"), 400),
    "16 not deflate": Case(_sized(CANARY, b"Content-Encoding: deflate\r\n"), 400),
    "16 brotli": Case(_sized(CANARY, b"Content-Encoding: br\r\n"), 415, "unsupported_media_type"),
    "16 zstd": Case(_sized(CANARY, b"Content-Encoding: zstd\r\n"), 415, "unsupported_media_type"),
    "16 unknown encoding": Case(_sized(CANARY, b"Content-Encoding: canary-4711\r\n"), 415),
    "17 a body that stops": Case(_post(b"Content-Length: 100\r\n", b"{"), 408, "request_timeout"),
    "18 half a header": Case(b"POST / HTTP/1.1\r\nHost: te", None),
    "18 half a request line": Case(b"POST /can", None),
    "19 nothing": Case(b"", None),
    "21 long header": Case(b"GET / HTTP/1.1\r\n" + HOST + b"X-Long: " + CANARY * 1000 + b"\r\n\r\n", 431),
    "21 long header without end": Case(b"GET / HTTP/1.1\r\n" + HOST + b"X-Long: " + CANARY * 1000, 431),
    "21 long header name": Case(b"GET / HTTP/1.1\r\n" + HOST + b"x" * 9000 + b": " + CANARY + b"\r\n\r\n", 431),
    "21 many headers": Case(
        b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"X-%d: %s\r\n" % (n, CANARY) for n in range(200)) + b"\r\n", 431
    ),
    "21 long URL": Case(b"GET /" + CANARY * 1000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414, "uri_too_long"),
    "21 long URL without end": Case(b"GET /" + CANARY * 1000, 414, "uri_too_long"),
    "22 length and chunked": Case(_post(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"), 400),
    "22 two lengths": Case(_post(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"hello"), 400),
    "22 bad chunk size": Case(_post(b"Transfer-Encoding: chunked\r\n", b"canary-4711\r\n"), 400),
    "22 negative length": Case(_post(b"Content-Length: -1\r\n"), 400),
    "22 no host": Case(b"GET /health HTTP/1.1\r\n\r\n", 400),
    "22 bare line feeds": Case(b"GET /health HTTP/1.1\nHost: canary-4711\n\n", 400),
    "22 NUL in a header": Case(b"GET /health HTTP/1.1\r\n" + HOST + b"X-A: canary\x00-4711\r\n\r\n", 400),
    "22 TLS on the plain port": Case(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03canary-4711\r\n\r\n", 400),
    "23 GET on a POST route": Case(b"GET /v1/chat/completions HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "23 unknown method": Case(b"CANARY-4711 /health HTTP/1.1\r\n" + HOST + b"\r\n", 405),
    "24 unknown path": Case(b"GET /canary-4711 HTTP/1.1\r\n" + HOST + b"\r\n", 404, "not_found"),
    "26 expecting to send too much": Case(_post(b"Expect: 100-continue\r\nContent-Length: 65537\r\n"), 413),
    "26 another expectation": Case(_post(b"Expect: canary-4711\r\nContent-Length: 0\r\n"), 417),
}


async def answer_to(server: Server, case: Case) -> bytes:
    """All that comes back, until the server hangs up or an answer is complete that leaves the connection open."""
    async with connected(server) as connection:
        await connection.send(case.sent)
        async with asyncio.timeout(15):
            while not _is_complete(connection.received):
                try:
                    data = await connection.reader.read(65536)
                except ConnectionError:
                    break
                if not data:
                    break
                connection.received += data
        return bytes(connection.received)


async def _answers(prompts: PromptMaker) -> dict[str, bytes]:
    """What each case is answered, all sent at once."""
    async with serving(prompts, limits=LIMITS) as server:
        found = await asyncio.gather(*[answer_to(server, case) for case in CASES.values()])
        await server.rig.settle()
        return dict(zip(CASES, found, strict=True))


def _is_complete(received: bytearray) -> bool:
    head, separator, _ = bytes(received).lower().partition(b"\r\n\r\n")
    is_last = b"http/1.0" in head or b"connection: close" in head
    return bool(separator) and not is_last and parse_reply(bytes(received)).is_whole


def fault_of(raw: bytes, case: Case) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    if case.status is None or not raw:
        return None if case.status is None and not raw else f"{raw!r:.300}"
    reply = parse_reply(raw)
    error = reply.error
    is_right = (
        (reply.status, reply.is_whole, error["type"]) == (case.status, True, "invalid_request_error")
        and case.code in (None, error["code"])
        and CANARY not in raw
        and raw.count(b"HTTP/1.") == 1
        and (case.status == 405) == ("allow" in reply.headers)
    )
    return None if is_right else f"{raw!r:.400}"


@pytest.mark.parametrize(("loop_factory", "parser"), [
    (uvloop.Loop, aiohttp.http_parser.HttpRequestParser),
    (asyncio.SelectorEventLoop, aiohttp.http_parser.HttpRequestParserPy),
], ids=["uvloop and the parser in C", "asyncio and the parser in Python"])  # fmt: skip
def test_bad_http_is_answered_in_the_envelope(
    prompts: PromptMaker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    parser: type[Any],
) -> None:
    monkeypatch.setattr(aiohttp.web_protocol, "HttpRequestParser", parser)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        answers = runner.run(_answers(prompts))
    faults = {name: fault_of(answers[name], case) for name, case in CASES.items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert CANARY.decode() not in caplog.text


async def _is_closed(connection: Connection) -> bool:
    return await connection.to_end() == b""


async def test_a_body_in_drops_is_timed_out_in_all(prompts: PromptMaker) -> None:
    async with serving(prompts, limits=replace(LIMITS, body_s=0.5)) as server, connected(server) as connection:
        await connection.send(_post(b"Content-Length: 1000\r\n"))
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                while not connection.received:
                    await connection.send(b" ")
                    with contextlib.suppress(TimeoutError):
                        connection.received += await asyncio.wait_for(connection.reader.read(65536), 0.05)
        assert parse_reply(bytes(connection.received)).status == 408


async def test_an_idle_connection_is_closed_and_one_in_use_is_not(prompts: PromptMaker) -> None:
    async with serving(prompts, limits=replace(LIMITS, header_s=0.2, idle_s=0.6)) as server:
        await server.rig.join(DECODE)
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, GOOD, is_last=False))
            leg = await server.rig.nodes[0].expect(Decode)
            await asyncio.sleep(0.4)  # longer than a header may take
            server.rig.nodes[0].emit(leg, [70], finish="length")
            await connection.until(b'"usage"')
            await connection.until(b"}}")
            first = len(connection.received)
            assert len(await connection.to_end()) == first


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "identity"])
async def test_compressed_bodies_are_read(prompts: PromptMaker, encoding: str) -> None:
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    body = {
        "gzip": gzip.compress(GOOD),
        "deflate": zlib.compress(GOOD),
        "raw deflate": raw.compress(GOOD) + raw.flush(),
        "identity": GOOD,
    }[encoding]
    async with serving(prompts, limits=LIMITS) as server:
        await server.rig.join(DECODE, _one_token)
        reply = await fetch(server, "POST", CHAT, body, {"content-encoding": encoding.split()[-1]})
        assert reply.status == 200


async def test_what_fits_is_asked_for_with_100_continue(prompts: PromptMaker) -> None:
    async with serving(prompts, limits=LIMITS) as server, connected(server) as connection:
        await server.rig.join(DECODE, _one_token)
        head = {"expect": "100-continue", "content-length": str(len(GOOD))}
        await connection.send(request_bytes("POST", CHAT, headers=head))
        assert await connection.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.received.clear()
        await connection.send(GOOD)
        assert parse_reply(await connection.to_end()).status == 200


async def test_a_second_request_may_come_before_the_first_answer(prompts: PromptMaker) -> None:
    async with serving(prompts, limits=LIMITS) as server, connected(server) as connection:
        await server.rig.join(DECODE, _one_token)
        first = request_bytes("POST", CHAT, GOOD, is_last=False)
        await connection.send(first + request_bytes("POST", CHAT, GOOD))
        raw = await connection.to_end()
        assert raw.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.Loop])
@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answers(
    prompts: PromptMaker, loop_factory: Callable[[], asyncio.AbstractEventLoop], num_requests: int, stream: bool
) -> None:
    async def run() -> bytes:
        async with serving(prompts, limits=LIMITS) as server, connected(server) as connection:
            decode = await server.rig.join(DECODE)
            body = json.dumps(chat_body(stream=stream)).encode()
            await connection.send(request_bytes("POST", CHAT, body, is_last=False) * num_requests)
            connection.writer.write_eof()
            for _ in range(num_requests):
                leg = await decode.expect(Decode)
                await asyncio.sleep(0.3)  # long enough for the server to ask whether anybody is there
                decode.emit(leg, [70], finish="length")
            raw = await connection.to_end()
            await server.rig.settle()
            return raw

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        raw = runner.run(run())
    assert raw.count(b"HTTP/1.1 200 OK") == num_requests
    assert raw.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").count(b"HTTP/1.1") == num_requests


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.Loop])
def test_a_client_that_leaves_politely_cancels_its_request(
    prompts: PromptMaker, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run() -> None:
        async with serving(prompts, limits=LIMITS) as server:
            decode = await server.rig.join(DECODE)
            async with connected(server) as connection:
                await connection.send(request_bytes("POST", CHAT, GOOD))
                await decode.expect(Decode)
                connection.writer.close()
                await connection.writer.wait_closed()
                await decode.expect(Cancel)
            await server.rig.settle()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def test_one_address_gets_so_many_connections_and_others_are_served(prompts: PromptMaker) -> None:
    limits = replace(LIMITS, header_s=20.0, max_connections_per_address=3, max_connections=5)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(prompts, limits=limits))
        held = [await stack.enter_async_context(connected(server)) for _ in range(3)]
        async with connected(server) as refused:
            reply = parse_reply(await refused.until(b"}}"))
            assert (reply.status, reply.error["type"], reply.headers["retry-after"]) == (429, "rate_limit_error", "1")
            async with connected(server) as also_refused, connected(server) as dropped:
                assert parse_reply(await also_refused.until(b"}}")).status == 429
                with contextlib.suppress(ConnectionError):
                    assert await dropped.to_end() == b""
            assert parse_reply(await refused.to_end()).is_whole
        await held[0].send(request_bytes("GET", "/v1/models"))
        assert parse_reply(await held[0].to_end()).status == 200
        async with asyncio.timeout(10):
            while server.http.connections.num_open > 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await fetch(server, "GET", "/v1/models")).status == 200
        assert server.http.connections.num_refused == 3


def _one_token(node: FakeNode, leg: LegMessage) -> None:
    node.emit(leg, [70], finish="length")
