"""The clients: a steady number of requests by the `openai` library, each compared with its reference while it comes.

Owns the requests in flight and what became of them. Says what was wrong with each answer by itself; whether an error
may have come is for `checks` to judge, which knows the faults. Every read has a deadline. The library knows nothing of
resuming, so its clients do as docs/api.md says: those of the modes "resume" and "cut" ask for the rest of their stream,
by the same request with `Last-Event-ID` or by its id, from the last event or from an earlier one. What is told again
has to be the same event to the letter.

What the library hides is not seen here: the line `[DONE]`, and what might come behind it
(`tests/router/http/test_serving.py`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
from openai import AsyncOpenAI, AsyncStream
from openai._streaming import SSEDecoder
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from tests.campaign.answers import Answer, Choice, Event, Failed, Wrong, answer_to, judged
from tests.campaign.corpus import Entry, creating
from tests.campaign.requests import CHAT, COMPLETIONS, RESPONSES, Body

GIVE_UP_S = 200.0
_REFUSED_S = 0.2
WELL, LEFT, ERROR, REFUSED, BROKEN, WRONG = "well", "left", "error", "refused", "broken", "wrong"
FORGOTTEN, HUNG = "forgotten", "hung"
"""The stream broke and cannot be resumed; it has not ended after `GIVE_UP_S`."""
_CUT = "cut off"
"""Its client broke its connection, and goes on if it can."""
FAILED = (ERROR, REFUSED, BROKEN, FORGOTTEN)
STREAM, RESUME, CUT, WHOLE, LEAVE = "stream", "resume", "cut", "whole", "leave"
"""What a client does: it reads a stream; it resumes one that broke; it breaks one once and resumes it, or asks for all
of it again when it is over; it asks without streaming; it leaves in the middle."""
_SHARES = {STREAM: 22, RESUME: 31, CUT: 20, WHOLE: 15, LEAVE: 12}
_STREAM_CLASSES: dict[str, Any] = {
    COMPLETIONS: AsyncStream[Completion],
    CHAT: AsyncStream[ChatCompletionChunk],
    RESPONSES: AsyncStream[ResponseStreamEvent],
}


@dataclass(slots=True)
class Asked:
    """One request of a client. `end`: how it ended, one of the words above, "" while it runs. `moments_s`: when news
    of each choice came, by `time.monotonic()`, and `totals`: how many tokens with ids it had then. `told`: ids and
    events, while it runs."""

    number: int
    entry: Entry
    mode: str
    begun_s: float
    request_id: str = ""
    ended_s: float | None = None
    end: str = ""
    message: str = ""
    num_resumed: int = 0
    num_told_again: int = 0
    moments_s: list[list[float]] = field(default_factory=list)
    totals: list[list[int]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    told: list[tuple[str, Event]] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        """When that of its unfinished choices last made progress that has waited longest."""
        unfinished = zip(self.choices, self.moments_s, strict=False)
        lasts_s = [
            moments[-1] if moments else self.begun_s for choice, moments in unfinished if not choice.finish_reason
        ]
        return min(lasts_s, default=self.begun_s)

    def __str__(self) -> str:
        size, request = sum(choice.size for choice in self.choices), self.entry.request
        entry = f"entry {self.entry.number}: {request.api}, {request.kind}"
        name = f"request {self.number} ({entry}, {self.mode}, id {self.request_id})"
        message = self.message and f": {self.message}"
        return f"{name}: {self.end or 'runs'} after {size} of {self.entry.size}{message}"


@dataclass(slots=True)
class _Reading:
    """An answer as far as it was told. `place`: how many of the events in `asked.told` the connection has brought."""

    asked: Asked
    answer: Answer
    place: int = 0

    def take(self, event_id: str, event: Event) -> int:
        """The next event; how much it brought. Raises `Wrong` at the first token that differs."""
        asked, self.place = self.asked, self.place + 1
        if self.place <= len(asked.told):
            asked.num_told_again += 1
            if (event_id, event) != asked.told[self.place - 1]:
                raise Wrong(f"event {self.place} was told again as {event}, and before as {asked.told[self.place - 1]}")
            return 0
        asked.told.append((event_id, event))
        sizes = [choice.size for choice in asked.choices]
        self.answer.take(event)
        asked.choices = self.answer.choices
        judged(asked.choices, asked.entry.choices, is_whole=False)
        news = [choice.size - size for choice, size in zip(asked.choices, sizes, strict=True)]
        for index, num_new in enumerate(news):
            if num_new:
                asked.moments_s[index].append(time.monotonic())
                asked.totals[index].append(len(asked.choices[index].token_ids))
        return sum(news)

    def end(self) -> None:
        """There is no more. Raises `Wrong` unless it is the reference."""
        if self.place < len(self.asked.told):
            raise Wrong(f"{self.place} of {len(self.asked.told)} events were told again")
        if self.answer.usage is None or not all(choice.finish_reason for choice in self.answer.choices):
            self.asked.end, self.asked.message = BROKEN, "the stream ended without an end of its answer"
            return
        judged(self.answer.choices, self.asked.entry.choices, is_whole=True)
        if self.answer.usage != self.asked.entry.usage:
            raise Wrong(f"usage is {self.answer.usage}, not {self.asked.entry.usage}")


class Load:
    """See the module. `asked` has all requests so far; `done` is called for each that has ended. `salted_share` of them
    find nothing in a prefix cache."""

    def __init__(
        self,
        entries: Sequence[Entry],
        client: AsyncOpenAI,
        seed: int,
        done: Callable[[Asked], None],
        salted_share: float = 0.7,
    ) -> None:
        self.asked: list[Asked] = []
        self.num_tokens = 0
        self._entries = entries
        self._client = client
        self._seed = seed
        self._done = done
        self._salted_share = salted_share
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []

    @property
    def running(self) -> list[Asked]:
        """Requests that have not ended."""
        return [asked for asked in self.asked[-4 * len(self._clients) :] if not asked.end]

    def start(self, num_clients: int) -> None:
        """Begin to ask, so many requests at a time."""
        self._clients = [asyncio.ensure_future(self._ask_on(number)) for number in range(num_clients)]

    async def stop(self) -> None:
        """Ask nothing more, and wait for what runs."""
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def ask(self, entry: Entry, mode: str, seed: float = 0.0) -> Asked:
        """One request, to its end."""
        rng = random.Random(seed)
        asked = Asked(len(self.asked), entry, mode, time.monotonic())
        self.asked.append(asked)
        body = _salted(entry.request.body) if rng.random() < self._salted_share else entry.request.body
        await self._ask(asked, body, rng)
        asked.ended_s = time.monotonic()
        self._done(asked)
        asked.told.clear()
        return asked

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(f"client {self._seed} {number}")
        while not self._is_over:
            mode = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
            asked = await self.ask(rng.choice(self._entries), mode, rng.random())
            if asked.end == REFUSED:
                await asyncio.sleep(_REFUSED_S)

    async def _ask(self, asked: Asked, body: Body, rng: random.Random) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                if asked.mode == WHOLE:
                    await self._ask_whole(asked, body)
                else:
                    await self._ask_stream(asked, body, rng)
                asked.end = LEFT if asked.end == _CUT else asked.end or WELL
        except (Wrong, LookupError, TypeError, AttributeError) as error:
            asked.end, asked.message = WRONG, str(error) if isinstance(error, Wrong) else repr(error)
        except TimeoutError:
            asked.end, asked.message = HUNG, f"it has not ended after {GIVE_UP_S:g} s"
        except (openai.APIError, Failed) as error:
            asked.end, asked.message = _end_by(error), _told_by(error)

    async def _ask_whole(self, asked: Asked, body: Body) -> None:
        told = await creating(self._client, asked.entry.request.api)(**body)
        asked.request_id = told._request_id or ""
        answer = answer_to(asked.entry.request)
        answer.take(told.to_dict())
        asked.choices = answer.choices
        _Reading(asked, answer).end()

    async def _ask_stream(self, asked: Asked, body: Body, rng: random.Random) -> None:
        request = asked.entry.request
        reading = _Reading(asked, answer_to(request))
        asked.choices = reading.answer.choices
        asked.moments_s, asked.totals = [[] for _ in asked.choices], [[] for _ in asked.choices]
        leave_at = rng.random() * (1.2 if asked.mode == CUT else 1) * asked.entry.size
        leave_at = leave_at if asked.mode in (CUT, LEAVE) else float("inf")
        create, body = creating(self._client, request.api), body | {"stream": True}
        if request.api != RESPONSES:
            body["stream_options"] = {"include_usage": True}
        await self._read(reading, create(**body), leave_at)
        while _goes_on(asked):
            await asyncio.sleep(_REFUSED_S * (asked.end in (BROKEN, REFUSED)))
            reading.place = rng.choice((1, rng.randint(1, len(asked.told)), len(asked.told)))
            last_id, asked.end, asked.message = asked.told[reading.place - 1][0], "", ""
            rest = self._rest(request.api, body, last_id, by_id=rng.random() < 0.5)
            await self._read(reading, rest, float("inf"), is_rest=True)

    def _rest(self, api: str, body: Body, last_id: str, *, by_id: bool) -> Awaitable[AsyncStream[Any]]:
        if by_id:
            return self._client.get(f"/streams/{last_id}", cast_to=object, stream=True, stream_cls=_STREAM_CLASSES[api])
        rest: Awaitable[AsyncStream[Any]] = creating(self._client, api)(
            **body, extra_headers={"Last-Event-ID": last_id}
        )
        return rest

    async def _read(
        self, reading: _Reading, asking: Awaitable[AsyncStream[Any]], leave_at: float, *, is_rest: bool = False
    ) -> None:
        """Take the events of an answer. `asked.end` is then how it ended, "" if it came to its end."""
        asked = reading.asked
        try:
            async with await asking as stream:
                asked.request_id = stream.response.headers.get("x-request-id", "")
                asked.num_resumed += is_rest
                async for event in stream:
                    self.num_tokens += reading.take(_last_id(stream), event.to_dict())
                    if sum(choice.size for choice in asked.choices) > leave_at:
                        asked.end = LEFT if asked.mode == LEAVE else _CUT
                        return
            reading.end()
        except openai.NotFoundError as error:
            asked.end, asked.message = FORGOTTEN if is_rest else ERROR, _told_by(error)
        except (openai.APIError, Failed) as error:
            asked.end, asked.message = _end_by(error), _told_by(error)


def _salted(body: Body) -> Body:
    """Nothing of it is in a prefix cache."""
    return body | {"extra_body": body["extra_body"] | {"cache_salt": secrets.token_hex(8)}}


def _goes_on(asked: Asked) -> bool:
    """Whether a client asks for the rest of its stream, or once for what it has."""
    if asked.mode not in (RESUME, CUT) or not asked.told or not asked.told[-1][0]:
        return False
    return asked.end in (BROKEN, REFUSED) or (asked.mode == CUT and asked.end in ("", _CUT) and not asked.num_resumed)


def _last_id(stream: AsyncStream[Any]) -> str:
    """The id of the event that the stream has just told: its decoder, which reads no further, has it and hides it."""
    decoder = stream._decoder
    assert isinstance(decoder, SSEDecoder)
    return decoder._last_event_id or ""


def _end_by(error: Exception) -> str:
    if not isinstance(error, openai.APIConnectionError):
        return ERROR
    return REFUSED if isinstance(error.__cause__, httpx2.ConnectError) else BROKEN


def _told_by(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400] + (f" ({error.__cause__!r})" if error.__cause__ else "")
