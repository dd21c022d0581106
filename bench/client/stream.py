"""One request on the wire: sends it, notes when bytes come, and says what became of it.

Owns deadlines and the naming of what can go wrong with a connection. A stamp is taken when a piece of the body is in
hand and before anybody looks into it; parsing is left until the stream is over.

Invariants: nothing but cancellation is raised; an answer whose [DONE] came is whole, however its connection ended; the
bytes kept of one answer are bounded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from bench.client.answer import AnswerReader, Problem, Received, error_message, find_problem
from bench.client.endpoint import Endpoint
from bench.client.outcome import Failure, Outcome

MAX_ANSWER_BYTES = 64 * 2**20
_MAX_ERROR_BYTES = 65536
_CLOSING_S = 1.0
_EVENTS_AT_ONCE = 32
"""Reading them takes a fraction of a millisecond, for which no other stream gets its stamps."""
_JSON_HEADERS = {"Content-Type": "application/json"}


async def send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    outcome: Outcome,
    timeout_s: float,
    stall_s: float | None = None,
) -> None:
    """Send `body` and fill in `outcome`.

    The whole answer has `timeout_s`; longer than `stall_s` (None: as long) it may not be silent. Of an answer that is
    complete, `end_s` is when the last event with choices came.
    """
    payload = json.dumps(body, separators=(",", ":")).encode()
    received = Received()
    outcome.sent_s = time.monotonic()
    problem = await _exchange(session, endpoint.url, payload, outcome, received, timeout_s, stall_s or timeout_s)
    outcome.closed_s = time.monotonic()
    reader = AnswerReader(received, outcome)
    for _ in reader.read(_EVENTS_AT_ONCE):
        await asyncio.sleep(0)
    if reader.is_done:
        problem = find_problem(outcome, body)
    elif problem is None:
        problem = _without_done(received, outcome)
    if outcome.failure is None and problem is not None:
        outcome.failure, outcome.message = problem
    outcome.end_s = outcome.chunk_s[-1] if outcome.failure is None else outcome.closed_s
    _settle_lengths(outcome, body)


async def _exchange(
    session: aiohttp.ClientSession,
    url: str,
    payload: bytes,
    outcome: Outcome,
    received: Received,
    timeout_s: float,
    stall_s: float,
) -> Problem | None:
    """Post `payload` and read to the end. What went wrong, None when the body ended as HTTP ends a body."""
    loop = asyncio.get_running_loop()
    whole_at = loop.time() + timeout_s
    try:
        async with (
            asyncio.timeout_at(min(whole_at, loop.time() + stall_s)) as deadline,
            session.post(url, data=payload, headers=_JSON_HEADERS, allow_redirects=False) as response,
        ):
            outcome.status = response.status
            if response.status != 200:
                message = error_message(await response.content.read(_MAX_ERROR_BYTES))
                return Failure.HTTP_ERROR, f"{response.status}: {message}"
            while piece := await response.content.readany():
                received.add(piece, time.monotonic())
                if received.num_bytes > MAX_ANSWER_BYTES:
                    return Failure.BAD_STREAM, f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
                patience_s = _CLOSING_S if received.may_be_over else stall_s
                deadline.reschedule(min(whole_at, loop.time() + patience_s))
    except TimeoutError:
        return Failure.STALLED, _stall(outcome, received, timeout_s)
    except (aiohttp.ClientError, OSError) as error:
        return _connection_problem(error)
    return None


def _connection_problem(error: aiohttp.ClientError | OSError) -> Problem:
    message = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, aiohttp.ClientConnectorError):
        return Failure.REFUSED_CONNECTION, message
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure.TRUNCATED, message
    if isinstance(error, aiohttp.ClientResponseError):
        return Failure.BAD_STREAM, message
    return Failure.LOST_CONNECTION, message


def _stall(outcome: Outcome, received: Received, timeout_s: float) -> str:
    """Whether the server fell silent or is only slow, and when."""
    now_s = time.monotonic()
    if not received.pieces:
        return f"nothing came in {now_s - outcome.sent_s:.3f} s"
    silent_s = now_s - received.came_s[-1]
    came = f"{received.num_bytes} bytes came"
    if now_s - outcome.sent_s >= timeout_s:
        return f"not complete after {timeout_s:g} s: {came}, the last {silent_s:.3f} s before"
    return f"silent for {silent_s:.3f} s after {came}"


def _without_done(received: Received, outcome: Outcome) -> Problem:
    if received.pieces and not outcome.chunk_s and not any(received.events()):
        return Failure.BAD_STREAM, f"not a stream of events: {error_message(received.pieces[0])}"
    return Failure.TRUNCATED, f"the stream ended after {len(outcome.chunk_s)} events with choices"


def _settle_lengths(outcome: Outcome, body: Mapping[str, Any]) -> None:
    """What the server counted, where it does; the ids that were sent are known better here."""
    num_output, num_prompt = outcome.usage.get("completion_tokens"), outcome.usage.get("prompt_tokens")
    outcome.num_output_tokens = num_output if isinstance(num_output, int) else sum(outcome.chunk_tokens)
    if isinstance(body.get("prompt"), list):
        outcome.num_prompt_tokens = len(body["prompt"])
    elif isinstance(num_prompt, int):
        outcome.num_prompt_tokens = num_prompt
