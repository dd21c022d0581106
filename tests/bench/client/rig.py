"""Helper: small workloads, and a load against a server of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.bench.client.driver import LoadPlan, LoadRun, run_load
from baton.bench.client.endpoint import COMPLETIONS, Endpoint, RequestOptions
from baton.bench.client.outcome import Outcome
from baton.bench.workload.dataset_settings import Prompt
from tests.bench.mock_server.schedule import Answer, Script

PATIENCE_S = 20.0


def endpoint(url: str, *, is_baton: bool = False) -> Endpoint:
    return Endpoint(url, COMPLETIONS, "mock", is_baton)


def prompt(num_output_tokens: int = 4) -> Prompt:
    return Prompt((1000, 1001, 1002), "one two three", num_output_tokens)


def questions(num: int, num_output_tokens: int = 4) -> tuple[Prompt, ...]:
    return (prompt(num_output_tokens),) * num


async def load(
    url: str, prompts: tuple[Prompt, ...], arrivals_s: tuple[float, ...], max_concurrency: int | None = None
) -> LoadRun:
    plan = LoadPlan(prompts, arrivals_s, max_concurrency, PATIENCE_S)
    return await run_load([endpoint(url)], plan, RequestOptions(), lambda _: None)


class Announcing:
    """A script that says when request `number` has come."""

    def __init__(self, script: Script, number: int) -> None:
        self._script = script
        self._number = number
        self.has_come = asyncio.Event()

    def answer(self, number: int, num_output_tokens: int) -> Answer:
        if number == self._number:
            self.has_come.set()
        return self._script.answer(number, num_output_tokens)


def all_fine(outcomes: Sequence[Outcome]) -> bool:
    return [outcome.message for outcome in outcomes if outcome.failure is not None] == []
