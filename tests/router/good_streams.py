"""Helper: 32 good streams, what else happens on their server, and every byte that their clients got.

The nodes say the next words of a stream when its client has read the words before, and as many bad inputs are over as
the test wants. No clock decides anything, so two runs differ only in what `settled` takes out.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from baton.engine.text.tokenizer import Tokenizer
from baton.wire.messages.legs import Decode, Prefill
from tests.router.fake_node import FakeNode, LegMessage, Script
from tests.router.http_client import PATIENCE_S, chat_body, completion_body, connected, request_bytes
from tests.router.rig import MODEL, Server

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NUM_STREAMS = 32
HELD_SEEDS = range(4711, 4711 + 2 * NUM_STREAMS)
"""Legs with these seeds are answered when the test says so. The good streams have the first of them."""
WITH_USAGE = {"include_usage": True, "continuous_usage_stats": True}
INPUT = {"model": MODEL, "input": "Where does the river go?"}

KINDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(return_token_ids=True)),
    (CHAT, chat_body(n=2, stop=["stopped early", "END"])),
    (CHAT, chat_body(n=2, logprobs=True, top_logprobs=2, stream_options=WITH_USAGE)),
    (CHAT, chat_body(stop="END", include_stop_str_in_output=True, stream_options={"include_usage": True})),
    (COMPLETIONS, completion_body(max_tokens=200)),
    (COMPLETIONS, completion_body(max_tokens=200, n=2, logprobs=3, stream_options=WITH_USAGE)),
    (COMPLETIONS, completion_body(max_tokens=200, n=2, stop=["stopped early", "END"], logprobs=0)),
    (RESPONSES, {**INPUT, "include": ["message.output_text.logprobs"]}),
]
TEXT_EVENT = {
    CHAT: b'"delta":{"content"',
    COMPLETIONS: b'"text":"',
    RESPONSES: b"event: response.output_text.delta",
}
"""What every event with text has once, and no other event has."""

_CHANGING = re.compile(
    rb'("(?:id|item_id)":"|"(?:created|created_at|completed_at)":|^x-request-id: |^Date: \w+, )[^",\r]+', re.MULTILINE
)

BadInput: TypeAlias = Callable[[Server, "HoldingNodes"], Awaitable[str | None]]
"""Sends something that is wrong; returns what is wrong with the answer, None when nothing is."""


@dataclass(frozen=True, slots=True)
class GoodStream:
    """One request and, for each of its choices, the words that nodes say of it one after the other."""

    number: int
    path: str
    members: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """Tells its legs from all others."""
        return HELD_SEEDS[self.number]

    @property
    def choices(self) -> range:
        """The numbers of its choices."""
        return range(self.members.get("n", 1))

    def words(self, choice: int) -> list[str]:
        """The first is one token, which a prefill node samples. Of each other some text leaves at once, though of some
        the end has to wait: it may be the beginning of a stop string."""
        name = f"{self.number}.{choice}"
        return ["A", f" stream {name}", " of grüße", " and 世界\u2028", " that stop", "ped late", ", END, or not"]


NUM_STEPS = len(GoodStream(0, CHAT, {}).words(0))
STREAMS = [GoodStream(number, *KINDS[number % len(KINDS)]) for number in range(NUM_STREAMS)]


@dataclass(slots=True)
class HoldingNodes:
    """What the nodes do: legs with `HELD_SEEDS` wait for the test, all others are left to `others`."""

    tokenizer: Tokenizer
    others: Script
    _legs: dict[tuple[type[LegMessage], int, int], tuple[FakeNode, LegMessage]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def script(self, node: FakeNode, leg: LegMessage) -> None:
        """The script of both nodes."""
        seed = leg.params.seed
        if seed is not None and seed in HELD_SEEDS:
            self._legs[type(leg), seed, leg.params.choice] = node, leg
            self._changed.set()
        else:
            self.others(node, leg)

    async def leg(self, kind: type[LegMessage], seed: int, choice: int = 0) -> tuple[FakeNode, LegMessage]:
        """A leg that waits, and the node that has it."""
        async with asyncio.timeout(PATIENCE_S):
            while (kind, seed, choice) not in self._legs:
                self._changed.clear()
                await self._changed.wait()
        return self._legs[kind, seed, choice]

    async def say(self, stream: GoodStream, choice: int, step: int) -> None:
        """The next words of a choice. The decode node begins with the token that the prefill node has sampled."""
        node, leg = await self.leg(Decode if step else Prefill, stream.seed, choice)
        words = [self.tokenizer.encode(text) for text in stream.words(choice)]
        index = sum(map(len, words[:step])) if step > 1 else 0
        token_ids = words[0] + words[1] if step == 1 else words[step]
        node.emit(leg, token_ids, index, finish="length" if step == NUM_STEPS - 1 else "")


class Pace:
    """How far the streams may go."""

    def __init__(self) -> None:
        self._open = [asyncio.Event() for _ in range(NUM_STEPS)]
        self._num_begun = 0
        self._have_begun = asyncio.Event()

    async def reaches(self, step: int) -> None:
        """Wait until the streams may take that step."""
        await self._open[step].wait()

    def begun(self) -> None:
        """Another stream has taken its first step."""
        self._num_begun += 1
        if self._num_begun == NUM_STREAMS:
            self._have_begun.set()

    async def lead(self, server: Server, nodes: HoldingNodes, bad: Mapping[str, BadInput]) -> dict[str, str]:
        """Send all `bad` inputs once every stream has begun; the streams move on as they are over, and end after them.
        Returns what is wrong with the answers."""
        faults: dict[str, str] = {}
        num_over = 0

        async def send(name: str) -> None:
            nonlocal num_over
            fault = await bad[name](server, nodes)
            if fault is not None:
                faults[name] = fault
            num_over += 1
            self._let(1 + num_over * (NUM_STEPS - 2) // len(bad))

        self._let(1)
        await self._have_begun.wait()
        await asyncio.gather(*map(send, bad))
        self._let(NUM_STEPS)
        return faults

    def _let(self, num_steps: int) -> None:
        for step in self._open[:num_steps]:
            step.set()


async def run_beside(
    server: Server, nodes: HoldingNodes, bad: Mapping[str, BadInput], headers: Mapping[str, str]
) -> tuple[Sequence[bytes], dict[str, str]]:
    """What the clients of all good streams got, `settled`, and what is wrong with the answers to `bad` inputs."""
    pace = Pace()
    streams = [_read(server, nodes, pace, stream, dict(headers)) for stream in STREAMS]
    faults, received = await asyncio.gather(pace.lead(server, nodes, bad), asyncio.gather(*streams))
    await server.rig.settle()
    return received, faults


async def _read(server: Server, nodes: HoldingNodes, pace: Pace, stream: GoodStream, headers: dict[str, str]) -> bytes:
    body = json.dumps({**stream.members, "stream": True, "seed": stream.seed}).encode()
    async with connected(server) as connection:
        await connection.send(request_bytes("POST", stream.path, body, headers))
        num_events = 0
        for step in range(NUM_STEPS):
            await pace.reaches(step)
            for choice in stream.choices:
                await nodes.say(stream, choice, step)
                num_events += 1
                await connection.until(TEXT_EVENT[stream.path], num_events)
            if step == 0:
                pace.begun()
        return settled(await connection.to_end())


def settled(received: bytes) -> bytes:
    """`received` without what is another one in each run: ids, and the time of day."""
    return _CHANGING.sub(rb"\1*", received)
