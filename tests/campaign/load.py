"""The clients: a steady number of requests, each compared with its reference while it comes.

Owns the requests in flight and what became of them. Says what was wrong with each answer by itself; whether an error
may have come is for `checks` to judge, which knows the faults. Every read has a deadline. A request of the mode
"resume" asks for the rest of its stream when its connection has broken, until there is a router that answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp

from tests.campaign.corpus import Body, Choice, Entry, choices_of

Asking: TypeAlias = AbstractAsyncContextManager[aiohttp.ClientResponse]

GIVE_UP_S = 200.0
_REFUSED_S = 0.2
WELL, LEFT, ERROR, REFUSED, BROKEN, WRONG = "well", "left", "error", "refused", "broken", "wrong"
FORGOTTEN = "forgotten"
"""The stream broke and cannot be resumed."""
FAILED = (ERROR, REFUSED, BROKEN, FORGOTTEN)


@dataclass(slots=True)
class Asked:
    """One request of a client. `end`: how it ended, one of the words above, "" while it runs. `moments_s`: when tokens
    of each choice came, by `time.monotonic()`, and `totals`: how many it had then. `last_id`: the id of the last event
    that came."""

    number: int
    entry: Entry
    mode: str
    begun_s: float
    request_id: str = ""
    ended_s: float | None = None
    end: str = ""
    message: str = ""
    last_id: str = ""
    num_resumed: int = 0
    moments_s: list[list[float]] = field(default_factory=list)
    totals: list[list[int]] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        """When that of its unfinished choices last made progress that has waited longest."""
        unfinished = zip(self.choices, self.moments_s, strict=False)
        lasts_s = [
            moments[-1] if moments else self.begun_s for choice, moments in unfinished if not choice.finish_reason
        ]
        return min(lasts_s, default=self.begun_s)

    def __str__(self) -> str:
        num_tokens = sum(len(choice.token_ids) for choice in self.choices)
        name = f"request {self.number} (entry {self.entry.number}, {self.mode}, id {self.request_id})"
        message = self.message and f": {self.message}"
        return f"{name}: {self.end or 'runs'} after {num_tokens} of {self.entry.num_tokens} tokens{message}"


class Wrong(Exception):
    """An answer is not what it has to be."""


class Load:
    """See the module. `asked` has all requests so far; `done` is called for each that has ended."""

    def __init__(
        self,
        entries: Sequence[Entry],
        session: aiohttp.ClientSession,
        url: str,
        seed: int,
        done: Callable[[Asked], None],
    ) -> None:
        self.asked: list[Asked] = []
        self.num_tokens = 0
        self._entries = entries
        self._session = session
        self._url = f"{url}/v1/completions"
        self._streams_url = f"{url}/v1/streams"
        self._seed = seed
        self._done = done
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []

    @property
    def running(self) -> list[Asked]:
        """Requests that have not ended."""
        return [asked for asked in self.asked[-4 * len(self._clients) :] if not asked.end]

    def start(self, num_clients: int) -> None:
        """Begin to ask, so many requests at a time."""
        self._clients = [asyncio.ensure_future(self._client(number)) for number in range(num_clients)]

    async def stop(self) -> None:
        """Ask nothing more, and wait for what runs."""
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def _client(self, number: int) -> None:
        rng = random.Random(f"client {self._seed} {number}")
        while not self._is_over:
            entry = rng.choice(self._entries)
            mode = rng.choices(("stream", "resume", "whole", "leave"), (35, 35, 18, 12))[0]
            leave_after = rng.randrange(max(1, entry.num_tokens))
            body = dict(entry.body)
            if rng.random() < 0.7:
                body["cache_salt"] = secrets.token_hex(8)
            asked = Asked(len(self.asked), entry, mode, time.monotonic())
            self.asked.append(asked)
            await self._ask(asked, body, leave_after)
            asked.ended_s = time.monotonic()
            self._done(asked)
            if asked.end == REFUSED:
                await asyncio.sleep(_REFUSED_S)

    async def _ask(self, asked: Asked, body: Body, leave_after: int) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_S):
                if asked.mode == "whole":
                    await self._ask_whole(asked, body)
                else:
                    await self._ask_stream(asked, body, leave_after)
        except Wrong as error:
            asked.end, asked.message = WRONG, str(error)
        except TimeoutError:
            asked.end, asked.message = WRONG, f"it has not ended after {GIVE_UP_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            asked.end, asked.message = _end_by(error), repr(error)

    async def _ask_whole(self, asked: Asked, body: Body) -> None:
        async with self._session.post(self._url, json=body) as answer:
            asked.request_id = answer.headers.get("x-request-id", "")
            if answer.status != 200:
                asked.end, asked.message = ERROR, f"{answer.status} {(await answer.text())[:300]}"
                return
            asked.choices = choices_of(body, await answer.json())
        self._compare(asked)

    async def _ask_stream(self, asked: Asked, body: Body, leave_after: int) -> None:
        asked.choices = [Choice() for _ in asked.entry.choices]
        asked.moments_s, asked.totals = [[] for _ in asked.choices], [[] for _ in asked.choices]
        await self._read(asked, self._session.post(self._url, json=body | {"stream": True}), leave_after)
        while asked.end in (BROKEN, REFUSED) and asked.mode == "resume" and asked.last_id:
            await asyncio.sleep(_REFUSED_S)
            rest = self._session.get(f"{self._streams_url}/{asked.last_id}")
            asked.end = asked.message = ""
            await self._read(asked, rest, leave_after, is_rest=True)
        if not asked.end:
            self._compare(asked)

    async def _read(self, asked: Asked, asking: Asking, leave_after: int, *, is_rest: bool = False) -> None:
        """Take the events of an answer. `asked.end` is then how it ended, "" for [DONE]."""
        try:
            async with asking as answer:
                asked.request_id = answer.headers.get("x-request-id", "")
                asked.num_resumed += is_rest and answer.status == 200
                if answer.status != 200:
                    asked.end = FORGOTTEN if is_rest and answer.status == 404 else ERROR
                    asked.message = f"{answer.status} {(await answer.text())[:300]}"
                    return
                await self._read_events(asked, answer, leave_after)
        except (aiohttp.ClientError, OSError) as error:
            asked.end, asked.message = _end_by(error), repr(error)

    async def _read_events(self, asked: Asked, answer: aiohttp.ClientResponse, leave_after: int) -> None:
        is_done, next_id = False, ""
        async for line in answer.content:
            if line.startswith(b"id: "):
                next_id = line[4:].strip().decode()
            elif not line.startswith(b"data: "):
                continue
            elif is_done:
                raise Wrong("something came behind [DONE]")
            elif line.strip() == b"data: [DONE]":
                is_done = True
            elif self._take_event(asked, json.loads(line[6:])):
                return
            else:
                asked.last_id = next_id
            if asked.mode == "leave" and _num_tokens(asked) >= leave_after:
                asked.end = LEFT
                answer.close()
                return
        if not is_done:
            asked.end, asked.message = BROKEN, "the stream ended without [DONE]"

    def _take_event(self, asked: Asked, event: dict[str, Any]) -> bool:
        """Whether it was an error. Raises `Wrong` at the first token that differs."""
        if "error" in event:
            asked.end, asked.message = ERROR, json.dumps(event["error"])[:300]
            return True
        for each in event["choices"]:
            choice, expected = asked.choices[each["index"]], asked.entry.choices[each["index"]]
            num_before = len(choice.token_ids)
            choice.take(each)
            num_now = len(choice.token_ids)
            if choice.token_ids[num_before:] != expected.token_ids[num_before:num_now]:
                raise Wrong(_difference(each["index"], choice, expected))
            if num_now > num_before:
                asked.moments_s[each["index"]].append(time.monotonic())
                asked.totals[each["index"]].append(num_now)
                self.num_tokens += num_now - num_before
        return False

    def _compare(self, asked: Asked) -> None:
        for index, (choice, expected) in enumerate(zip(asked.choices, asked.entry.choices, strict=True)):
            if choice != expected:
                raise Wrong(_difference(index, choice, expected))
        asked.end = WELL


def _end_by(error: Exception) -> str:
    return REFUSED if isinstance(error, aiohttp.ClientConnectorError) else BROKEN


def _num_tokens(asked: Asked) -> int:
    return sum(len(choice.token_ids) for choice in asked.choices)


def _difference(index: int, choice: Choice, expected: Choice) -> str:
    for name in ("token_ids", "logprobs", "text"):
        have, want = getattr(choice, name), getattr(expected, name)
        for place, (one, other) in enumerate(zip(have, want, strict=False)):
            if one != other:
                return f"choice {index}: {name}[{place}] is {one!r}, not {other!r} ({len(have)} of {len(want)})"
    lengths = f"{len(choice.token_ids)} tokens and {choice.finish_reason!r}"
    return f"choice {index} has {lengths}, not {len(expected.token_ids)} and {expected.finish_reason!r}"
