"""Asking a real server, request by request: one event loop, prompts that nobody has seen, answers or an error.

Owns what the measurements that start `baton serve` have in common. Does not know what they make of the answers.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from bench.client.driver import LoadPlan, run_load
from bench.client.endpoint import Endpoint
from bench.client.outcome import Outcome
from bench.client.request import RequestOptions
from bench.targets.spec import Target
from bench.workload.turns import Conversation, Turn
from engine.api.errors import RequestFailed
from engine.models.config import load_config
from engine.models.identity import find_checkpoint

TIMEOUT_S = 120.0
OPTIONS = RequestOptions(ignore_eos=True, temperature=0.0, with_timings=True)
_FIRST_ID = 10  # special tokens mostly come first


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client has to know of a model: ids below `vocab_size`, prompt and answer within `max_tokens`."""

    vocab_size: int
    num_layers: int
    max_tokens: int


def served_model(model: str) -> ServedModel:
    """Of the `model` setting, as `baton serve` takes it. Raises `ModelLoadError`."""
    config = load_config(find_checkpoint(model, weights=False))
    return ServedModel(config.vocab_size, config.num_layers, config.max_context_len)


def baton_target(name: str, model: str, *flags: str) -> Target:
    """A Baton to be started on a free port."""
    return Target(name, "", ("baton", "serve", *filter(None, (model,)), *flags))


class Prompts:
    """Draws prompts of random ids: no prefix cache knows any of them."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(_FIRST_ID, vocab_size)
        self._chance = random.Random(seed)

    def conversation(self, num_tokens: int, num_output_tokens: int) -> Conversation:
        """One request with a new prompt."""
        return Conversation((Turn(tuple(self._chance.choices(self._ids, k=num_tokens)), "", num_output_tokens),))


def client_runner() -> asyncio.Runner:
    """An event loop as the other benchmarks' client has."""
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
