from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client import stream
from baton.bench.client.endpoint import Endpoint, RequestOptions, body_of
from baton.bench.client.outcome import Failure, Outcome
from baton.bench.client.stream import Received, read_answer, send
from tests.bench.client.raw_server import raw_server
from tests.bench.client.rig import PATIENCE_S, endpoint, prompt
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script
from tests.bench.mock_server.server import mock_server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(
    session: aiohttp.ClientSession,
    there: Endpoint,
    num_output_tokens: int = 4,
    options: RequestOptions | None = None,
    timeout_s: float = PATIENCE_S,
) -> Outcome:
    outcome = Outcome(0, 0.0)
    body = body_of(prompt(num_output_tokens), there, options or RequestOptions(ignore_eos=True))
    await send(session, there, body, outcome, timeout_s)
    return outcome


@pytest.mark.parametrize(
    ("fault", "failure", "message", "num_chunks"),
    [
        (Fault(FaultKind.HTTP_ERROR, status=429, message="slow down"), Failure.HTTP_ERROR, "429: slow down", 0),
        (Fault(FaultKind.RESET), Failure.LOST_CONNECTION, "", 0),
        (Fault(FaultKind.CUT), Failure.LOST_CONNECTION, "disconnected", 0),
        (Fault(FaultKind.RESET, 2), Failure.TRUNCATED, "not completed", 2),
        (Fault(FaultKind.CUT, 2), Failure.TRUNCATED, "not completed", 2),
    ],
)
async def test_every_fault_of_a_connection_has_its_name(
    session: aiohttp.ClientSession, fault: Fault, failure: Failure, message: str, num_chunks: int
) -> None:
    async with mock_server(Script((Answer(0.0, (0.001,) * 3, fault=fault), Answer(0.0, (0.001,) * 3)))) as server:
        there = endpoint(server.url)
        outcome = await ask(session, there)
        after = await ask(session, there)
    assert outcome.failure is failure
    assert message in outcome.message
    assert len(outcome.chunk_s) == num_chunks
    assert outcome.closed_s >= outcome.sent_s
    assert after.failure is None


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


TOKEN = b'data: {"choices":[{"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(num_prompt: int, num_output: int) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (num_prompt, num_output)


@pytest.mark.parametrize(
    ("pieces", "failure", "message"),
    [
        ([TOKEN, TOKEN], Failure.TRUNCATED, "ended after 2 events with choices"),
        ([b'{"choices":[]}'], Failure.BAD_STREAM, "not a stream of events: {"),
        ([usage(3, 0), DONE], Failure.NO_TOKENS, "0 events with choices"),
        ([TOKEN * 4, usage(3, 5), DONE], Failure.WRONG_USAGE, "5 completion tokens, but 4 were to come"),
        ([TOKEN * 4, usage(4, 4), DONE], Failure.WRONG_USAGE, "4 prompt tokens, but 3 were sent"),
    ],
)
async def test_every_fault_of_an_answer_has_its_name(
    session: aiohttp.ClientSession, pieces: list[bytes], failure: Failure, message: str
) -> None:
    async with raw_server(chunked(*pieces, b"")) as url:
        outcome = await ask(session, endpoint(url))
    assert outcome.failure is failure
    assert message in outcome.message


async def test_nobody_listening_is_a_refusal(session: aiohttp.ClientSession) -> None:
    async with mock_server(Script((Answer(0.0),))) as server:
        pass
    outcome = await ask(session, endpoint(server.url))
    assert outcome.failure is Failure.REFUSED_CONNECTION
    assert "ClientConnectorError" in outcome.message


async def test_an_answer_that_is_not_complete_in_time_has_stalled(session: aiohttp.ClientSession) -> None:
    silent = Answer(0.0, (0.0,) * 9, fault=Fault(FaultKind.STALL, 2))
    slow = Answer(0.0, (0.01,) * 500)
    async with mock_server(Script((silent, slow))) as server:
        first, second = [await ask(session, endpoint(server.url), timeout_s=0.3) for _ in range(2)]
    assert (first.failure, second.failure) == (Failure.STALLED, Failure.STALLED)
    assert first.message.startswith("not complete: ")
    assert len(first.chunk_s) == 2
    assert len(second.chunk_s) > 2


async def test_an_answer_is_over_at_its_end_even_when_its_connection_is_not(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_CLOSING_S", 0.02)
    async with raw_server(chunked(TOKEN, DONE)) as url:
        outcome = await ask(session, endpoint(url))
    assert (outcome.failure, outcome.text) == (None, "x")


async def test_an_endless_answer_is_given_up(session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_ANSWER_BYTES", 2000)
    async with mock_server(Script((Answer(0.0, (0.0001,) * 20_000),))) as server:
        outcome = await ask(session, endpoint(server.url))
        await server.until_idle(PATIENCE_S)
    assert (outcome.failure, outcome.message) == (Failure.BAD_STREAM, "the answer is longer than 2000 bytes")


def event(choice: dict[str, Any] | None = None, **members: Any) -> bytes:
    choices = [] if choice is None else [choice]
    return b"data: " + json.dumps({"choices": choices, **members}).encode() + b"\n\n"


def read(*pieces: bytes) -> tuple[Outcome, bool]:
    """Piece i came at second i. Whether [DONE] was seen stands second."""
    received, outcome = Received(), Outcome(0, 0.0)
    for came_s, piece in enumerate(pieces):
        received.add(piece, float(came_s))
    return outcome, asyncio.run(read_answer(received, outcome))


WHOLE = (
    event({"text": "a\u00e9"})
    + b": a comment\n\n"
    + event({"text": ""})
    + event({"text": "\n\ndata: [DONE]", "finish_reason": "length"})
    + event(usage={"completion_tokens": 3})
    + DONE
)


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=8))
def test_how_a_stream_is_cut_changes_no_token(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(WHOLE)]
    pieces = [WHOLE[begin:end] for begin, end in pairwise(edges)]
    outcome, is_done = read(*pieces)
    assert is_done
    assert outcome.text == "a\u00e9\n\ndata: [DONE]"
    assert outcome.chunk_tokens == [1, 1, 1]
    assert outcome.usage == {"completion_tokens": 3}
    last_bytes = [WHOLE.index(b"\n\n" + following) - 1 for following in (b": a", b'data: {"choices": [{"text": "\\n')]
    for place, last_byte in enumerate(last_bytes):
        assert outcome.chunk_s[place] == next(i for i, end in enumerate(edges[1:]) if end > last_byte)


def test_a_chat_opens_without_a_token() -> None:
    outcome, _ = read(
        event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}),
        event({"delta": {"content": "x"}}),
        event({"delta": {}, "finish_reason": "stop"}),
        DONE,
    )
    assert (outcome.text, outcome.chunk_tokens) == ("x", [0, 1, 1])


@pytest.mark.parametrize(
    ("data", "failure", "message"),
    [
        (b'{"choices": [{]}', Failure.BAD_STREAM, "not JSON: "),
        (b"\xff\xfe", Failure.BAD_STREAM, "not JSON: "),
        (b"[" * 100_000, Failure.BAD_STREAM, "not JSON: "),
        (b"17", Failure.BAD_STREAM, "no object: 17"),
        (b'{"choices": {"text": "x"}}', Failure.BAD_STREAM, "unknown choices"),
        (b'{"choices": ["x"]}', Failure.BAD_STREAM, "unknown choices"),
        (b'{"choices": [{"text": 5}]}', Failure.BAD_STREAM, "unknown members"),
        (b'{"error": {"message": "out of memory", "code": 500}}', Failure.ERROR_EVENT, "out of memory"),
        (b'{"error": "out of memory"}', Failure.ERROR_EVENT, "out of memory"),
        (b'{"object": "error", "message": "out of memory"}', Failure.ERROR_EVENT, "out of memory"),
    ],
)
def test_what_cannot_be_read_ends_the_answer(data: bytes, failure: Failure, message: str) -> None:
    outcome, is_done = read(event({"text": "a"}), b"data: " + data + b"\n\n", event({"text": "b"}), DONE)
    assert outcome.failure is failure
    assert message in outcome.message
    assert (outcome.text, is_done) == ("a", False)
