"""Real steps of an engine, and their times: decode steps over a given context, and whole prompts.

Owns how requests get into an engine for it. Those that decode get their blocks as on a decode node: reserved, then
continued; their KV is noise, which takes as long to read as any other. Invariant: no request outlives a measurement,
and every step that is timed held the whole batch.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.build import Engine
from engine.scheduler.request import RequestOutput
from wire.errors import RequestFailed
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

GREEDY = DecodingParams(temperature=0.0, ignore_eos=True)
ONE_BY_ONE = DecodingParams(temperature=0.0, ignore_eos=True, presence_penalty=0.01)
"""A penalty needs every token before the next: such a step is not launched on top of the one before it."""
_MAX_EMPTY_STEPS = 8


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """`step_ms` of each step, and the contexts of the step in the middle."""

    step_ms: tuple[float, ...]
    context_lens: tuple[int, ...]


class EngineSteps:
    """Drives one engine by hand."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._chance = random.Random(0)
        self._keys = map(RequestKey.numbered, itertools.count())
        fill_with_noise(engine.memory.paged.blocks)

    def decode(self, batch: int, context: int, num_steps: int, params: DecodingParams = GREEDY) -> DecodeTimes:
        """So many steps of `batch` requests that begin with `context` tokens, after a few that warm up."""
        with self.decoding(batch, context, params):
            self.advance(batch, _MAX_EMPTY_STEPS)
            taken_ms, lens = [], [context + _MAX_EMPTY_STEPS + num_steps // 2] * batch
            for _ in range(num_steps):
                begin_s = time.perf_counter()
                self.advance(batch, 1)
                taken_ms.append((time.perf_counter() - begin_s) * 1e3)
        return DecodeTimes(tuple(taken_ms), tuple(lens))

    def prefill_ms(self, num_tokens: int) -> float:
        """From nothing to the first token of a prompt that no cache knows."""
        key = next(self._keys)
        self._core.add(key, self._tokens(num_tokens), GREEDY, first_token_only=True)
        try:
            begin_s = time.perf_counter()
            while not any(output.has_left for output in self._core.step()):
                if not self._core.has_work:
                    raise RequestFailed("a prompt left the engine without its first token")
            return (time.perf_counter() - begin_s) * 1e3
        finally:
            self._forget([key])

    def advance(self, batch: int, num_tokens: int) -> None:
        """Step until every request has so many more tokens. Raises `RequestFailed` for a step without all of them."""
        for _ in range(num_tokens):
            outputs = self._next_outputs()
            if len(outputs) != batch or any(output.token is None for output in outputs):
                raise RequestFailed(f"a step drew {len(outputs)} tokens for {batch} requests")

    @contextmanager
    def decoding(self, batch: int, context: int, params: DecodingParams = GREEDY) -> Iterator[None]:
        """So many requests that came with the KV of `context` tokens and decode from then on."""
        keys = list(itertools.islice(self._keys, batch))
        try:
            for key in keys:
                token_ids = self._tokens(context + 1)
                reservation = self._core.reserve(key, token_ids[:-1])
                if reservation is None:
                    raise RequestFailed(f"the engine has no room for {batch} requests of {context} tokens")
                self._core.add_reserved(
                    reservation, token_ids, params, num_prompt_tokens=context, num_computed_tokens=context
                )
            yield
        finally:
            self._forget(keys)

    def _next_outputs(self) -> list[RequestOutput]:
        """Of the next step that has any: with overlap the first call only begins one."""
        for _ in range(_MAX_EMPTY_STEPS):
            if outputs := self._core.step():
                return outputs
        raise RequestFailed(f"{_MAX_EMPTY_STEPS} steps gave nothing")

    def _forget(self, keys: list[RequestKey]) -> None:
        for key in keys:
            self._core.abort(key)
            self._core.release(key)
        for _ in range(_MAX_EMPTY_STEPS):
            if not self._core.has_work:
                break
            self._core.step()
        self._core.take_cache_changes()

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(self._engine.config.vocab_size), k=count)


def fill_with_noise(kv: torch.Tensor) -> None:
    """Random keys and values: zeros would be read faster than real ones are."""
    for block in kv:
        block.normal_()
