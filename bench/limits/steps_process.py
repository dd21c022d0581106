"""Real steps of an engine, and their times: decode steps over a given context, and whole prompts.

Owns how requests get into an engine for it. Those that decode get their blocks as on a decode node: reserved, then
continued; their KV is noise, which takes as long to read as any other. Invariants: no request outlives a measurement,
and every step that is timed held the whole batch.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.build import Engine, build_engine
from engine.runner.kv_memory import allocate_private
from engine.scheduler.request import RequestOutput
from engine.settings import EngineSettings
from wire.errors import RequestFailed
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

GREEDY = DecodingParams(temperature=0.0, ignore_eos=True)
ONE_BY_ONE = DecodingParams(temperature=0.0, ignore_eos=True, presence_penalty=0.01)
"""A penalty needs every token before the next: such a step is not launched on top of the one before it."""
_MAX_EMPTY_STEPS = 8


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of each step, and the contexts that the requests of each had, the new token included."""

    step_s: list[float]
    context_lens: list[list[int]]


class EngineSteps:
    """Drives an engine with a pool of KV in private memory by hand."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine: Engine = build_engine(settings, allocate_private)
        self._core = self.engine.core
        self._chance = random.Random(0)
        self._keys = map(RequestKey.numbered, itertools.count())
        for block in self.engine.memory.paged.blocks:
            block.normal_()

    def decode(
        self, batch: int, context: int, num_steps: int, *, num_warm_up: int = 1, params: DecodingParams = GREEDY
    ) -> DecodeTimes:
        """So many steps of `batch` requests that begin with `context` tokens. Raises `RequestFailed`."""
        times = DecodeTimes([], [])
        with self.decoding(batch, context, params):
            self.advance(batch, num_warm_up)
            for _ in range(num_steps):
                begin_s = time.perf_counter()
                outputs = self._next_outputs(batch)
                times.step_s.append(time.perf_counter() - begin_s)
                times.context_lens.append([output.num_computed_tokens for output in outputs])
        return times

    def prefill_s(self, num_tokens: int) -> float:
        """From nothing to the first token of a prompt that no cache knows."""
        key = next(self._keys)
        self._core.add(key, self._tokens(num_tokens), GREEDY, first_token_only=True)
        try:
            begin_s = time.perf_counter()
            while not any(output.has_left for output in self._core.step()):
                if not self._core.has_work:
                    raise RequestFailed("a prompt left the engine without its first token")
            return time.perf_counter() - begin_s
        finally:
            self._forget([key])

    def generate(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Generated tokens per second of `batch` prompts that come together, prompts included."""
        params = DecodingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        begin_s = time.perf_counter()
        for key in itertools.islice(self._keys, batch):
            self._core.add(key, self._tokens(num_prompt), params)
        num_generated = 0
        while self._core.has_work:
            num_generated += sum(output.token is not None for output in self._core.step())
        return num_generated / (time.perf_counter() - begin_s)

    def advance(self, batch: int, num_steps: int) -> None:
        """Step until every request has so many more tokens. Raises `RequestFailed` for a step without all of them."""
        for _ in range(num_steps):
            self._next_outputs(batch)

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

    def _next_outputs(self, batch: int) -> list[RequestOutput]:
        """Of the next step that has any: where steps overlap, the first call only begins one."""
        for _ in range(_MAX_EMPTY_STEPS):
            if outputs := self._core.step():
                if len(outputs) != batch or any(output.token is None for output in outputs):
                    raise RequestFailed(f"a step held {len(outputs)} of {batch} requests")
                return outputs
        raise RequestFailed(f"{_MAX_EMPTY_STEPS} steps gave nothing")

    def _forget(self, keys: list[RequestKey]) -> None:
        for key in keys:
            self._core.abort(key)
            self._core.release(key)
        while self._core.has_work:
            self._core.step()  # one that was in flight for them
        self._core.take_cache_changes()

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(self.engine.config.vocab_size), k=count)
