"""The requests of a campaign and what each has to answer.

Owns their references, which are computed once by the same relay before anything is disturbed, one request at a time,
and held against the schemas that were sent. Nodes run batch-invariant, so a reference is what every later answer has to
equal to the bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tests.campaign.answers import Answer, Choice, Wrong, answer_to
from tests.campaign.requests import CHAT, COMPLETIONS, MAX_PROMPT, RESPONSES, VOCABULARY, Body, Request, make_request
from tests.campaign.settings import CampaignSettings
from tests.system.harness import MODEL_NAME

_STOP_LENGTH = 3
_NUM_TIMED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """A request and what it has to answer: its choices, and how many tokens prompt and output have. `silent_s`: for how
    long its stream tells nothing when nothing disturbs it, where events have no ids of tokens: the beginning of a call
    is told when the name of the function is known, which may take many tokens."""

    number: int
    request: Request
    choices: tuple[Choice, ...]
    usage: tuple[int, int]
    silent_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return self.usage[1]

    @property
    def size(self) -> int:
        """Of all choices, see `Choice.size`."""
        return sum(choice.size for choice in self.choices)


async def make_corpus(settings: CampaignSettings, client: AsyncOpenAI, *, sees: bool) -> list[Entry]:
    """All requests, each asked alone, the first time without a stop string where one is to be chosen. Raises `Wrong`
    when an answer is not valid."""
    rng = random.Random(f"corpus {settings.seed}")
    entries = []
    for number in range(settings.num_requests):
        request = make_request(rng, settings.max_tokens, settings.structured, sees=sees)
        entry = await _entry(client, number, request)
        if request.api == COMPLETIONS and rng.random() < 0.3 and (stop := _stop_in(entry.choices[0].text)):
            entry = await _entry(client, number, request.with_stop(stop))
        entries.append(entry)
    return entries


async def token_seconds(client: AsyncOpenAI) -> float:
    """How long the relay takes for a token of a prompt that is asked alone: of a few long ones, the slowest."""
    slowest_s = 0.0
    for _ in range(_NUM_TIMED):
        prompt = [random.randrange(VOCABULARY) for _ in range(MAX_PROMPT)]
        body: Body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "extra_body": {"ignore_eos": True}}
        begun_s = time.monotonic()
        await ask(client, Request(COMPLETIONS, "", body))
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
    return slowest_s / MAX_PROMPT


async def ask(client: AsyncOpenAI, request: Request) -> Answer:
    """The whole answer. Raises `openai.APIError` when there is none."""
    answer = answer_to(request)
    answer.take((await creating(client, request.api)(**request.body)).to_dict())
    return answer


def creating(client: AsyncOpenAI, api: str) -> Any:
    """The method of the client that asks at this interface."""
    methods: Mapping[str, Any] = {
        COMPLETIONS: client.completions.create,
        CHAT: client.chat.completions.create,
        RESPONSES: client.responses.create,
    }
    return methods[api]


async def _entry(client: AsyncOpenAI, number: int, request: Request) -> Entry:
    answer = await ask(client, request)
    for choice in answer.choices:
        if invalid := choice.invalid(request.schemas):
            raise Wrong(f"the reference of request {number} is not valid: {invalid}")
    assert answer.usage is not None
    silent_s = await _silent_seconds(client, request) if request.api == RESPONSES else 0.0
    return Entry(number, request, tuple(answer.choices), answer.usage, silent_s)


async def _silent_seconds(client: AsyncOpenAI, request: Request) -> float:
    """The longest time between two pieces of an answer that is asked alone."""
    answer, longest_s, last_s = answer_to(request), 0.0, time.monotonic()
    async with await creating(client, request.api)(**request.body, stream=True) as stream:
        async for event in stream:
            size = sum(choice.size for choice in answer.choices)
            answer.take(event.to_dict())
            if sum(choice.size for choice in answer.choices) > size:
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    return longest_s


def _stop_in(text: str) -> str:
    """Some letters that the text has behind its first third for the first time; "" if there are none."""
    for place in range(len(text) // 3, len(text) - _STOP_LENGTH):
        found = text[place : place + _STOP_LENGTH]
        if found.isascii() and found.isprintable() and text.index(found) == place:
            return found
    return ""
