"""A node's engine and the machine's ceilings in one process: `python -m bench.limits.engine_process`.

Owns an engine built as a node builds its own (malloc settings, cores, threads, scheduler, cache), and a `Machine` that
is measured in turns with it. What it times are real steps of the engine; it knows no rates and no ratios.

Requests that decode get their blocks as on a decode node: reserved, then continued. Their KV is noise, which takes as
long to read as any other. Invariants: no request outlives a command; every step that is timed held the whole batch.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bench.child import Worker, serve_parent
from bench.limits.machine_process import Machine
from bench.limits.model_shapes import ModelShapes, shapes_of
from device.host import HostStaging
from engine.attention.base import SequenceShare
from engine.attention.torch_backend import TorchAttention
from engine.build import Engine, build_engine
from engine.models.checkpoint import choose_dtype
from engine.models.config import load_config
from engine.models.decoder import TORCH_DTYPES
from engine.models.identity import find_checkpoint
from engine.runner.kv_memory import allocate_private
from engine.scheduler.request import RequestOutput
from engine.settings import EngineSettings
from program.process import keep_freed_memory
from wire.errors import RequestFailed
from wire.layout import DTYPE_BYTES
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

_GREEDY = DecodingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to build. The KV pool holds `num_pool_tokens`, and is no smaller than the ceilings' buffers."""

    model: str
    cores: list[int]
    num_threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pool_tokens: int
    num_product_rows: int
    buffer_bytes: int


class EngineBench:
    """Times one engine, and the machine beside it."""

    def __init__(self, spec: EngineSpec) -> None:
        settings = EngineSettings(
            model=spec.model,
            num_threads=spec.num_threads,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        )
        self._engine, self._shapes, self._dtype = _build(settings, spec)
        paged = self._engine.memory.paged
        paged.blocks.copy_(torch.randn(paged.blocks.shape[1:]).to(paged.blocks.dtype))
        self._attention = TorchAttention(paged)
        products = self._shapes.prefill_products(spec.num_product_rows)
        self._machine = Machine(spec.buffer_bytes, spec.num_threads, TORCH_DTYPES[self._dtype], products)
        self._block_size = settings.block_size
        self._chance = random.Random(0)
        self._keys = map(RequestKey.numbered, itertools.count())
        self._next_block = 0

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "describe", {}:
                return {"shapes": asdict(self._shapes), "dtype": self._dtype, "num_blocks": self._engine.num_blocks}
            case "read", {"num_passes": int(num_passes)}:
                return self._machine.read(num_passes)
            case "copy", {"num_passes": int(num_passes)}:
                return self._machine.copy(num_passes)
            case "multiply", {}:
                return self._machine.multiply()
            case "prefill", {"num_tokens": int(num_tokens)}:
                return self._prefill(num_tokens)
            case "decode", {"batch": int(batch), "context": int(context), "num_steps": int(num_steps)}:
                return self._decode(batch, context, num_steps)
            case "attend", {"batch": int(batch), "context": int(context), "num_calls": int(num_calls)}:
                return self._attend(batch, context, num_calls)
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        self._machine.close()

    def _prefill(self, num_tokens: int) -> dict[str, Any]:
        """Seconds, and number, of the steps from nothing to the first token of a prompt that no cache knows."""
        core, key, num_steps, has_left = self._engine.core, next(self._keys), 0, False
        core.add(key, self._tokens(num_tokens), _GREEDY, first_token_only=True)
        try:
            begin_s = time.monotonic()
            while not has_left:
                has_left = self._step(1)[0].has_left
                num_steps += 1
            taken_s = time.monotonic() - begin_s
        finally:
            self._forget([key])
        return {"taken_s": taken_s, "num_steps": num_steps}

    def _decode(self, batch: int, context: int, num_steps: int) -> dict[str, Any]:
        """Seconds of `num_steps` steps, and the context lengths that the requests of each step had."""
        context_lens = []
        with self._decoding(batch, context):
            self._step(batch)
            begin_s = time.monotonic()
            for _ in range(num_steps):
                context_lens.append([output.num_computed_tokens for output in self._step(batch)])
            taken_s = time.monotonic() - begin_s
        return {"taken_s": taken_s, "context_lens": context_lens}

    @contextmanager
    def _decoding(self, batch: int, context: int) -> Iterator[None]:
        """So many requests that came with the KV of `context` tokens and decode from then on."""
        core = self._engine.core
        keys = list(itertools.islice(self._keys, batch))
        try:
            for key in keys:
                token_ids = self._tokens(context + 1)
                reservation = core.reserve(key, token_ids[:-1])
                if reservation is None:
                    raise RequestFailed(f"the engine has no room for {batch} requests of {context} tokens")
                core.add_reserved(
                    reservation, token_ids, _GREEDY, num_prompt_tokens=context, num_computed_tokens=context
                )
            yield
        finally:
            self._forget(keys)

    def _forget(self, keys: list[RequestKey]) -> None:
        core = self._engine.core
        for key in keys:
            core.abort(key)
            core.release(key)
        while core.has_work:
            core.step()  # a step that was under way for them
        core.take_cache_changes()

    def _step(self, batch: int) -> list[RequestOutput]:
        outputs = self._engine.core.step()
        if len(outputs) != batch:
            raise RequestFailed(f"a step held {len(outputs)} of {batch} requests")
        return outputs

    @torch.inference_mode()
    def _attend(self, batch: int, context: int, num_calls: int) -> float:
        """Seconds in which the attention backend plans and runs all layers of `num_calls` decode steps, each over
        blocks that were not read for as long as the pool is large."""
        shapes, dtype = self._shapes, TORCH_DTYPES[self._dtype]
        q = torch.randn(batch, shapes.num_heads, shapes.head_dim).to(dtype)
        k, v = torch.randn(2, batch, shapes.num_kv_heads, shapes.head_dim).to(dtype)
        steps = [[self._anywhere(context) for _ in range(batch)] for _ in range(num_calls)]
        begin_s = time.monotonic()
        for shares in steps:
            self._attention.plan(shares, HostStaging())
            for layer in range(shapes.num_layers):
                self._attention.run(layer, q, k, v)
        return time.monotonic() - begin_s

    def _anywhere(self, context: int) -> SequenceShare:
        """The last of `context` tokens, in the next blocks of the pool. No request lives that they could belong to."""
        count, num_blocks = -(-context // self._block_size), self._engine.num_blocks
        table = [(self._next_block + offset) % num_blocks for offset in range(count)]
        self._next_block = (self._next_block + count) % num_blocks
        return SequenceShare(context - 1, 1, table)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(self._shapes.vocab_size), k=count)


def _build(settings: EngineSettings, spec: EngineSpec) -> tuple[Engine, ModelShapes, str]:
    """The engine with its shapes and the name of its dtype."""
    config = load_config(find_checkpoint(settings.model))
    dtype = choose_dtype(settings.dtype, config)
    shapes = shapes_of(config, DTYPE_BYTES[dtype])
    num_tokens = max(spec.num_pool_tokens, spec.buffer_bytes // shapes.kv_bytes_per_token)
    engine = build_engine(replace(settings, num_blocks=1 - -num_tokens // settings.block_size), allocate_private)
    return engine, shapes, dtype


def _begin(spec: dict[str, Any]) -> Worker:
    engine_spec = EngineSpec(**spec)
    os.sched_setaffinity(0, engine_spec.cores)
    keep_freed_memory()
    return EngineBench(engine_spec)


if __name__ == "__main__":
    serve_parent(_begin)
