"""Structured answers over a real relay, while its nodes are killed and replaced."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.system.harness import Relay, start_relay
from tests.system.reference import make_prompt

MAX_TOKENS = 160
_NUM_IN_FLIGHT = 8
_KILL_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class RelayAnswer:
    """An answer to the schema of number `place`; `error`: why there is none."""

    place: int
    text: str
    finish_reason: str
    error: str = ""


@contextmanager
def relay_of_four(model: Path, folder: Path) -> Iterator[Relay]:
    """Two prefill nodes and two decode nodes."""
    relay = start_relay(model, folder, prefill=((), ()), decode=((), ()))
    try:
        yield relay
    finally:
        relay.close()


def ask_all(
    relay: Relay, schemas: Sequence[dict[str, Any]], temperatures: Sequence[float], seed: int
) -> tuple[list[RelayAnswer], int]:
    """Answers, and how many nodes were killed meanwhile. Prompts repeat, so that prefixes are found."""
    cases = [(place, temperature) for place in range(len(schemas)) for temperature in temperatures]
    chance, num_killed = random.Random(seed), 0

    def ask(number: int) -> RelayAnswer:
        place, temperature = cases[number]
        return _ask(relay.client, schemas[place], place, number, temperature)

    with ThreadPoolExecutor(_NUM_IN_FLIGHT) as threads:
        asked = [threads.submit(ask, number) for number in range(len(cases))]
        # in this thread: nodes end with the thread that has started them
        while wait(asked, timeout=_KILL_EVERY_S).not_done:
            victim = chance.choice(relay.prefills if num_killed % 2 else relay.decodes)
            relay.drop(victim)
            num_killed += 1
            relay.add(victim.role)
    relay.settle()
    return [each.result() for each in asked], num_killed


def _ask(client: openai.OpenAI, schema: dict[str, Any], place: int, number: int, temperature: float) -> RelayAnswer:
    prompt = [*make_prompt(64, number % 3), *make_prompt(1 + number % 23, number)]
    json_schema = {"name": "x", "schema": schema, "strict": True}
    try:
        chunks = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=prompt,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=number,
            stream=True,
            extra_body={"response_format": {"type": "json_schema", "json_schema": json_schema}},
        )
        text, reason = "", ""
        for chunk in chunks:
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
    except (openai.APIError, json.JSONDecodeError) as error:
        return RelayAnswer(place, "", "", f"{type(error).__name__}: {error}"[:200])
    return RelayAnswer(place, text, reason)
