"""One request on the wire: sends it, notes when bytes come, and says what became of it.

Owns deadlines, the naming of what can go wrong with a connection, the format of server-sent events and of OpenAI's
stream objects, and the checks of an answer. A stamp is taken when a piece of the body is in hand and before anybody
looks into it; parsing is left until the stream is over, a few events at a time, so that others get their stamps.

Invariants: nothing but cancellation is raised; how a stream was cut into pieces changes no token, only stamps; an event
came when its last byte did; an answer whose [DONE] came is whole, however its connection ended; the bytes kept of one
answer are bounded; what cannot be read is a failure and never an exception.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import aiohttp

from baton.bench.client.endpoint import Endpoint
from baton.bench.client.outcome import Failure, Outcome, count_of

_DONE = b"[DONE]"
_FIELD = b"data:"
_SHOWN = 200

Problem: TypeAlias = tuple[Failure, str]
MAX_ANSWER_BYTES = 64 * 2**20
_MAX_ERROR_BYTES = 65536
_CLOSING_S = 1.0
_EVENTS_AT_ONCE = 32
"""Reading them takes a fraction of a millisecond, for which no other stream gets its stamps."""
_FAILURES: dict[type[Exception], Failure] = {
    aiohttp.ClientConnectorError: Failure.REFUSED_CONNECTION,
    aiohttp.ClientPayloadError: Failure.TRUNCATED,
    aiohttp.ClientResponseError: Failure.BAD_STREAM,
}
_JSON_HEADERS = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Received:
    """The pieces of one body in order, and when each came (`time.monotonic()` seconds)."""

    pieces: list[bytes] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, piece: bytes, came_s: float) -> None:
        self.pieces.append(piece)
        self.came_s.append(came_s)
        self.num_bytes += len(piece)

    @property
    def may_be_over(self) -> bool:
        """Whether the last piece ends as a stream does. A stream that is cut inside of its last line is not noticed."""
        return self.pieces[-1].rstrip().endswith(_DONE)

    def events(self) -> Iterator[tuple[float, bytes, bool]]:
        """(when its last byte came, data, whether its line was ended) of every event."""
        body = b"".join(self.pieces)
        ends = list(accumulate(map(len, self.pieces)))
        end = -1
        for line in body.split(b"\n"):
            end += len(line) + 1
            if line.startswith(_FIELD) and (data := line[len(_FIELD) :].strip()):
                yield self.came_s[bisect_left(ends, end)], data, end < len(body)


async def read_answer(received: Received, outcome: Outcome) -> bool:
    """Fill `outcome` with what the events of a body say, up to [DONE], the first failure, or their end; whether [DONE]
    came. Others have their turn every few events."""
    texts: list[str] = []
    is_done = False
    for number, (came_s, data, is_whole) in enumerate(received.events(), 1):
        if data == _DONE:
            is_done = True
            break
        try:
            problem = _take(json.loads(data), came_s, outcome, texts)
        except (ValueError, RecursionError):
            if not is_whole:
                break
            problem = Failure.BAD_STREAM, f"an event is not JSON: {data[:_SHOWN].decode(errors='replace')}"
        if problem is not None:
            outcome.failure, outcome.message = problem
            break
        if number % _EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    outcome.text = "".join(texts)
    return is_done


def _take(event: Any, came_s: float, outcome: Outcome, texts: list[str]) -> Problem | None:
    """A choice of a chat has its text in `delta`, one of a completion has it itself."""
    if not isinstance(event, dict):
        return Failure.BAD_STREAM, f"an event is no object: {str(event)[:_SHOWN]}"
    if event.get("error") or event.get("object") == "error":
        return Failure.ERROR_EVENT, _sentence(event)
    usage, choices = event.get("usage"), event.get("choices")
    if isinstance(usage, dict):
        outcome.usage = usage
    if not choices:
        return None
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        return Failure.BAD_STREAM, f"an event has unknown choices: {str(choices)[:_SHOWN]}"
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if not isinstance(text, str | None):
        return Failure.BAD_STREAM, f"a choice has unknown members: {str(choice)[:_SHOWN]}"
    texts.append(text or "")
    outcome.chunk_s.append(came_s)
    opens = isinstance(delta, dict) and "role" in delta and not choice.get("finish_reason")
    outcome.chunk_tokens.append(int(bool(text) or not opens))
    return None


def find_problem(outcome: Outcome, body: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a stream that ended well, against the request's own `body`."""
    num_completion, num_prompt = (outcome.usage.get(f"{part}_tokens") for part in ("completion", "prompt"))
    if not sum(outcome.chunk_tokens) or num_completion == 0:
        return Failure.NO_TOKENS, f"{len(outcome.chunk_s)} events with choices, none with a token"
    num_asked, prompt = body.get("max_tokens", body.get("max_completion_tokens")), body.get("prompt")
    if num_completion is not None:
        has_other_end = body.get("stop") or body.get("stop_token_ids") or not body.get("ignore_eos")
        if not has_other_end and num_completion != num_asked:
            return Failure.WRONG_USAGE, f"{num_completion} completion tokens, but {num_asked} were to come"
    if num_prompt is not None and isinstance(prompt, list) and num_prompt != len(prompt):
        return Failure.WRONG_USAGE, f"{num_prompt} prompt tokens, but {len(prompt)} were sent"
    return None


def error_message(body: bytes) -> str:
    """The sentence in the body of an error: OpenAI's envelope, what resembles it, or how the body begins."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body[:_SHOWN].decode(errors="replace").strip()
    return _sentence(found)


def _sentence(found: Any) -> str:
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), str(found))
    return str(found)[:_SHOWN]


async def send(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: Mapping[str, Any], outcome: Outcome, timeout_s: float
) -> None:
    """Send `body` and fill in `outcome`. The whole answer has `timeout_s`."""
    payload = json.dumps(body, separators=(",", ":")).encode()
    received = Received()
    outcome.sent_s = time.monotonic()
    problem = await _exchange(session, endpoint.url, payload, outcome, received, timeout_s)
    outcome.closed_s = time.monotonic()
    if await read_answer(received, outcome):
        problem = find_problem(outcome, body)
    elif problem is None:
        problem = _without_done(received, outcome)
    if outcome.failure is None and problem is not None:
        outcome.failure, outcome.message = problem
    _settle_lengths(outcome, body)


async def _exchange(
    session: aiohttp.ClientSession, url: str, payload: bytes, outcome: Outcome, received: Received, timeout_s: float
) -> Problem | None:
    """Post `payload` and read to the end. What went wrong, None when the body ended as HTTP ends a body."""
    loop = asyncio.get_running_loop()
    whole_at = loop.time() + timeout_s
    try:
        async with (
            asyncio.timeout_at(whole_at) as deadline,
            session.post(url, data=payload, headers=_JSON_HEADERS, allow_redirects=False) as response,
        ):
            if response.status != 200:
                message = error_message(await response.content.read(_MAX_ERROR_BYTES))
                return Failure.HTTP_ERROR, f"{response.status}: {message}"
            while piece := await response.content.readany():
                received.add(piece, time.monotonic())
                if received.num_bytes > MAX_ANSWER_BYTES:
                    return Failure.BAD_STREAM, f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
                deadline.reschedule(min(whole_at, loop.time() + _CLOSING_S) if received.may_be_over else whole_at)
    except TimeoutError:
        silent_s = time.monotonic() - (received.came_s or [outcome.sent_s])[-1]
        return Failure.STALLED, f"not complete: {received.num_bytes} bytes came, nothing in the last {silent_s:.3f} s"
    except (aiohttp.ClientError, OSError) as error:
        found = [failure for kind, failure in _FAILURES.items() if isinstance(error, kind)]
        return (*found, Failure.LOST_CONNECTION)[0], f"{type(error).__name__}: {error}"[:300]
    return None


def _without_done(received: Received, outcome: Outcome) -> Problem:
    if received.pieces and not outcome.chunk_s and not any(received.events()):
        return Failure.BAD_STREAM, f"not a stream of events: {error_message(received.pieces[0])}"
    return Failure.TRUNCATED, f"the stream ended after {len(outcome.chunk_s)} events with choices"


def _settle_lengths(outcome: Outcome, body: Mapping[str, Any]) -> None:
    """What the server counted, where it does; the ids that were sent are known better here."""
    num_output, num_prompt = (count_of(outcome.usage.get(f"{part}_tokens")) for part in ("completion", "prompt"))
    outcome.num_output_tokens = sum(outcome.chunk_tokens) if num_output is None else num_output
    if isinstance(body.get("prompt"), list):
        outcome.num_prompt_tokens = len(body["prompt"])
    elif num_prompt is not None:
        outcome.num_prompt_tokens = num_prompt
