"""Asking one request after the other: prompts that nobody has seen, an answer or an error.

For measurements of single requests on an idle server. Owns how such a request looks; what is made of the answers is the
business of whoever asks.
"""

from __future__ import annotations

import asyncio
import random

from bench.client.driver import LoadPlan, run_load
from bench.client.endpoint import Endpoint, RequestOptions
from bench.client.outcome import Outcome
from bench.workload.turns import Conversation, Turn
from wire.errors import RequestFailed

TIMEOUT_S = 120.0
OPTIONS = RequestOptions(ignore_eos=True, temperature=0.0, with_timings=True)
_FIRST_ID = 10  # special tokens mostly come first


class Prompts:
    """Draws prompts of random ids: no prefix cache knows any of them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(_FIRST_ID, vocab_size)
        self._chance = random.Random(seed)

    def conversation(self, num_tokens: int, num_output_tokens: int) -> Conversation:
        return Conversation((Turn(tuple(self._chance.choices(self._ids, k=num_tokens)), "", num_output_tokens),))


def client_runner() -> asyncio.Runner:
    """The event loop that every benchmark's client runs on: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def ask(endpoint: Endpoint, conversation: Conversation) -> Outcome:
    """One request, alone. Raises `RequestFailed` when it is not answered as it should be."""
    plan = LoadPlan((conversation,), None, 1, TIMEOUT_S)
    outcome = (await run_load([endpoint], plan, OPTIONS, lambda _: None)).outcomes[0]
    require_answer(outcome)
    return outcome


def require_answer(outcome: Outcome) -> None:
    """Raise `RequestFailed` when a request failed."""
    if outcome.failure is not None:
        raise RequestFailed(f"a request failed: {outcome.failure}: {outcome.message}")
