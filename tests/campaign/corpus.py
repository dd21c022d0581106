"""The requests of a campaign and what each has to answer.

Owns the seeded making of requests (lengths, greedy and sampled, choices, stop strings, log probabilities, structure)
and their references, which are computed once by the same relay before anything is disturbed, one request at a time.
Nodes run batch-invariant, so a reference is what every later answer has to equal to the bit.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp

from tests.campaign.settings import CampaignSettings
from tests.system.harness import MODEL_NAME

Body: TypeAlias = dict[str, Any]
MAX_CHOICES = 3
_MAX_PROMPT = 600
_VOCABULARY = 316
_STOP_LENGTH = 3
_NUM_TIMED = 3
_STRUCTURES: tuple[Body, ...] = (
    {"regex": "([a-z]{3} [0-9]{2}[,;]){20}"},
    {"json": {"type": "array", "items": {"enum": ["north", "north-east", 7, None]}, "minItems": 12, "maxItems": 40}},
    {"grammar": 'root ::= pair{16,40}\npair ::= "(" [a-z]+ "=" [0-9]{2} ")" | "(" pair pair ")"'},
)


@dataclass(slots=True)
class Choice:
    """One choice as its client sees it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""

    def take(self, choice: dict[str, Any]) -> None:
        """Add what an event, or a whole answer, says of it."""
        self.token_ids += choice.get("token_ids") or []
        self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason


@dataclass(frozen=True, slots=True)
class Entry:
    """A request and what it has to answer, one choice each."""

    number: int
    body: Body
    choices: tuple[Choice, ...]

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


async def make_corpus(settings: CampaignSettings, session: aiohttp.ClientSession, url: str) -> list[Entry]:
    """All requests, each asked alone, the first time without a stop string where one is to be chosen."""
    rng = random.Random(f"corpus {settings.seed}")
    entries = []
    for number in range(settings.num_requests):
        body = make_body(rng, settings.max_tokens, settings.structured)
        choices = await ask(session, url, body)
        if number % 5 == 4 and (stop := _stop_in(choices[0].text)):
            body["stop"] = [stop]
            choices = await ask(session, url, body)
        entries.append(Entry(number, body, tuple(choices)))
    return entries


async def token_seconds(session: aiohttp.ClientSession, url: str) -> float:
    """How long the relay takes for a token of a prompt that is asked alone: of a few long ones, the slowest."""
    slowest_s = 0.0
    for _ in range(_NUM_TIMED):
        prompt = [random.randrange(_VOCABULARY) for _ in range(_MAX_PROMPT)]
        begun_s = time.monotonic()
        await ask(session, url, {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "ignore_eos": True})
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
    return slowest_s / _MAX_PROMPT


def make_body(rng: random.Random, max_tokens: int, structured: float) -> Body:
    """A request as its fields; with a structure in this share of calls."""
    length = round(2 ** rng.uniform(1, 9.2))
    body: Body = {
        "model": MODEL_NAME,
        "prompt": [rng.randrange(_VOCABULARY) for _ in range(min(length, _MAX_PROMPT))],
        "max_tokens": round(8 + (max_tokens - 8) * rng.random() ** 1.5),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice((0.7, 1.0, 1.3)), "seed": rng.randrange(2**31)}
        body["n"] = rng.choice((1, 1, 2, MAX_CHOICES))
        if rng.random() < 0.3:
            body |= {"top_p": 0.9, "frequency_penalty": 0.4}
    if rng.random() < 0.3:
        body["logprobs"] = rng.choice((0, 2))
    if rng.random() < structured:
        body |= {"structured_outputs": rng.choice(_STRUCTURES), "ignore_eos": False}
    return body


async def ask(session: aiohttp.ClientSession, url: str, body: Body) -> list[Choice]:
    """The whole answer. Raises `aiohttp.ClientResponseError` when there is none."""
    async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
        return choices_of(body, await answer.json())


def choices_of(body: Body, answer: dict[str, Any]) -> list[Choice]:
    """The choices of an answer that is not streamed."""
    choices = [Choice() for _ in range(body.get("n", 1))]
    for each in answer["choices"]:
        choices[each["index"]].take(each)
    return choices


def _stop_in(text: str) -> str:
    """Some letters that the text has behind its first third for the first time; "" if there are none."""
    for place in range(len(text) // 3, len(text) - _STOP_LENGTH):
        found = text[place : place + _STOP_LENGTH]
        if found.isascii() and found.isprintable() and text.index(found) == place:
            return found
    return ""
