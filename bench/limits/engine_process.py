"""How close an engine comes to the machine: `decode_bw_ratio`, `prefill_flop_ratio`, and their ceilings.

`python -m baton.bench.limits.engine_process`. Owns how requests get into an engine whose steps are timed; an engine
with the cores, threads and malloc settings of a node; and two buffers larger than the caches in the same process:
memory settings and threads are the same for both. Every ratio is a rate of the engine over a rate of the machine,
measured in turns; numerators are what a step cannot avoid (`baton.bench.limits.model_shapes`), so whatever else the
engine does makes its ratio smaller.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton.bench.child import Worker, serve_parent
from baton.bench.limits.model_shapes import Product, shapes_of
from baton.bench.limits.result import TIMES_CACHE, LimitsSettings, ceiling_of, in_turns, last_cache_bytes, ratio_of
from baton.bench.numbers import median
from baton.engine.build import Engine, build_engine
from baton.engine.handoffs import FirstToken
from baton.engine.models.checkpoint import choose_dtype
from baton.engine.models.config import load_config
from baton.engine.models.decoder import TORCH_DTYPES
from baton.engine.models.identity import find_checkpoint
from baton.engine.runner.kv_memory import allocate_private, allocate_shared
from baton.engine.scheduler.step import RequestOutput
from baton.engine.settings import EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.runtime.process import keep_freed_memory
from baton.wire.errors import RequestFailed
from baton.wire.layout import DTYPE_BYTES
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_GREEDY = DecodingParams(temperature=0.0, ignore_eos=True)
_MAX_EMPTY_STEPS = 8
_NUM_PASSES = 8
"""Over the buffers in a round: one pass takes a few milliseconds, and a moment's disturbance would be all of it."""
_NUM_STEPS = 8
_MIN_SEQS = 64
_SPARE_TOKENS = 48
"""What a request may use of the pool beyond its context: the steps of a round, and blocks that are not full."""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of each step, and the contexts that the requests of each had, the new token included."""

    step_s: list[float]
    context_lens: list[list[int]]


class EngineSteps:
    """Drives an engine with a pool of KV in private memory by hand.

    Requests that decode get their blocks as on a decode node: reserved, then continued; their KV is noise, which takes
    as long to read as any other. Invariants: no request outlives a measurement, and every step that is timed held the
    whole batch. With stages, of which each computes a part of it, what is timed is until all of them have a token.
    """

    def __init__(self, settings: EngineSettings) -> None:
        allocate = allocate_shared if settings.num_ranks > 1 else allocate_private
        self.engine: Engine = build_engine(settings, allocate, open_executor=open_executor)
        self._num_stages = settings.pipeline_parallel_size
        self._core = self.engine.core
        self._chance = random.Random(0)
        self._keys = map(RequestKey.numbered, itertools.count())
        for block in self.engine.memory.paged.blocks:
            block.normal_()

    def decode(self, batch: int, context: int, num_steps: int, *, num_warm_up: int = 1) -> DecodeTimes:
        """So many steps of `batch` requests that begin with `context` tokens. Raises `RequestFailed`."""
        times = DecodeTimes([], [])
        with self.decoding(batch, context):
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
        self._core.add(key, Prompt.of(self._tokens(num_tokens)), _GREEDY, first_token_only=True)
        try:
            begin_s = time.perf_counter()
            while not any(output.has_left for output in self._core.step()):
                if not self._core.has_work:
                    raise RequestFailed("a prompt left the engine without its first token")
            return time.perf_counter() - begin_s
        finally:
            self._forget([key])

    def advance(self, batch: int, num_steps: int) -> None:
        """Step until every request has so many more tokens. Raises `RequestFailed` for a step without all of them."""
        for _ in range(num_steps):
            self._next_outputs(batch)

    @contextmanager
    def decoding(self, batch: int, context: int) -> Iterator[None]:
        """So many requests that came with the KV of `context` tokens and decode from then on."""
        keys = list(itertools.islice(self._keys, batch))
        try:
            for key in keys:
                *token_ids, first_id = self._tokens(context + 1)
                prompt = Prompt.of(token_ids)
                reservation = self._core.handoffs.reserve(key, prompt)
                if reservation is None:
                    raise RequestFailed(f"the engine has no room for {batch} requests of {context} tokens")
                self._core.handoffs.add_reserved(reservation, prompt, [FirstToken(key, _GREEDY, first_id)])
            yield
        finally:
            self._forget(keys)

    def _next_outputs(self, batch: int) -> list[RequestOutput]:
        """Of the next step that has any: where steps overlap, the first call only begins one. Of as many steps as there
        are stages: they divide the batch."""
        found: list[RequestOutput] = []
        for _ in range(_MAX_EMPTY_STEPS * self._num_stages):
            outputs = self._core.step()
            found += outputs
            if len(found) == batch and all(output.tokens for output in found):
                return found
            if outputs and (self._num_stages == 1 or len(found) > batch):
                raise RequestFailed(f"a step held {len(outputs)} of {batch} requests")
        raise RequestFailed(f"{_MAX_EMPTY_STEPS} steps gave nothing")

    def _forget(self, keys: list[RequestKey]) -> None:
        for key in keys:
            self._core.abort(key)
            self._core.handoffs.release(key)
        while self._core.has_work:
            self._core.step()  # one that was in flight for them
        self._core.take_cache_changes()

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(self.engine.config.vocab_size), k=count)


class Machine:
    """What the machine can do, as rates. Buffers have every page touched, in huge pages where the system has them."""

    def __init__(self, num_bytes: int, num_threads: int, dtype: torch.dtype, products: list[Product]) -> None:
        self._source, self._target = allocate_private(num_bytes), allocate_private(num_bytes)
        self._source[:] = self._target[:] = 1
        self._parts = np.array_split(self._source.view(np.float32), num_threads)
        self._others = ThreadPoolExecutor(max(1, num_threads - 1))
        self._products = [(_library_product(product, dtype), product.count) for product in products]
        self._flop = sum(product.flop for product in products)
        threads, size, rows = f"{num_threads} thread(s)", f"{num_bytes / 2**20:.0f} MiB", products[0].num_rows
        gemm = f"oneDNN products of all layers with {rows} rows and of the head with 1, weights packed, {threads}"
        self.notes = {
            "memcpy": ("GB/s", f"np.copyto of {size}, 1 thread, payload counted once"),
            "read_stream": ("GB/s", f"np.dot over the halves of {size} of float32, {threads}"),
            "gemm": ("GFLOP/s", gemm),
        }

    def rate(self, name: str) -> float:
        """Of the ceiling `name`, in the unit that `notes` has."""
        begin_s = time.monotonic()
        if name == "gemm":
            self._multiply()
            return self._flop / (time.monotonic() - begin_s) / 1e9
        for _ in range(_NUM_PASSES):
            self._read() if name == "read_stream" else np.copyto(self._target, self._source)
        return _NUM_PASSES * self._source.nbytes / (time.monotonic() - begin_s) / 1e9

    def close(self) -> None:
        self._others.shutdown()

    def _read(self) -> None:
        """The dot product of two halves of each thread's share of a buffer: two streams of loads, no stores."""
        reading = [self._others.submit(_dot, part) for part in self._parts[1:]]
        _dot(self._parts[0])
        for part in reading:
            part.result()

    @torch.inference_mode()
    def _multiply(self) -> None:
        for multiply, count in self._products:
            for _ in range(count):
                multiply()


class EngineLimits:
    """Measures what it is asked for. See `baton.bench.child.Worker`; `spec`: the settings of `baton bench limits`."""

    def __init__(self, settings: LimitsSettings) -> None:
        config = load_config(find_checkpoint(settings.model))
        dtype = choose_dtype("auto", config)
        self._settings = settings
        self._shapes = shapes_of(config, DTYPE_BYTES[dtype])
        self._chunk = min(settings.num_prompt_tokens, settings.max_num_batched_tokens)
        # the pool is no smaller than the ceilings' buffers
        num_tokens = max(
            max(settings.batch_sizes) * (max(settings.context_lens) + _SPARE_TOKENS),
            settings.num_prompt_tokens + _SPARE_TOKENS,
            settings.buffer_bytes // self._shapes.kv_bytes_per_token,
        )
        engine = EngineSettings(
            model=settings.model,
            num_threads=settings.num_threads,
            max_num_seqs=max(_MIN_SEQS, *settings.batch_sizes),
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=_BLOCK_SIZE,
            num_blocks=1 - -num_tokens // _BLOCK_SIZE,
            cpu_kernels=settings.cpu_kernels,
        )
        self._steps = EngineSteps(engine)
        products = self._shapes.prefill_products(self._chunk)
        self._machine = Machine(settings.buffer_bytes, settings.num_threads, TORCH_DTYPES[dtype], products)
        self._samples: dict[str, list[float]] = {}

    def decode_bw_ratio(self, batch: int, context: int) -> dict[str, Any]:
        """A decode step's weights and KV over the time that it takes, against the rate of reading."""
        taken_s: list[float] = []
        num_steps = 2 if self._settings.quick else _NUM_STEPS
        step_bytes = self._shapes.decode_bytes([context + 1] * batch)

        def gb_per_s() -> float:
            times = self._steps.decode(batch, context, num_steps)
            taken_s.append(sum(times.step_s) / num_steps)
            return sum(map(self._shapes.decode_bytes, times.context_lens)) / sum(times.step_s) / 1e9

        reading, subject = self._against("read_stream", gb_per_s)
        note = f"{step_bytes / 1e6:.1f} MB in {median(taken_s[1:]) * 1e3:.2f} ms a step"
        if step_bytes < TIMES_CACHE * last_cache_bytes():
            note += ", in part from caches"
        case = f"batch {batch}, context {context}"
        return asdict(ratio_of("decode_bw_ratio", case, subject, reading, goal="1", note=note))

    def prefill_flop_ratio(self) -> dict[str, Any]:
        """A prompt's operations over the time to its first token, against the rate of its bare products."""
        num_tokens = self._settings.num_prompt_tokens
        flop = self._shapes.prefill_flop(num_tokens)
        products, subject = self._against("gemm", lambda: flop / self._steps.prefill_s(num_tokens) / 1e9)
        rate = median(subject)
        note = f"{flop / 1e9:.1f} GFLOP in {flop / rate / 1e6:.1f} ms, {rate:.0f} GFLOP/s"
        case = f"{num_tokens} tokens, chunks of {self._chunk}"
        return asdict(ratio_of("prefill_flop_ratio", case, subject, products, goal="1", note=note))

    def ceilings(self, names: list[str]) -> list[dict[str, Any]]:
        """Those that the ratios needed, of all their rounds, and those that are named."""
        for name in names:
            if name not in self._samples:
                self._samples[name] = [self._machine.rate(name) for _ in range(1 + self._settings.num_rounds)][1:]
        notes = self._machine.notes
        return [asdict(ceiling_of(name, self._samples[name], *notes[name])) for name in notes if name in self._samples]

    def close(self) -> None:
        self._machine.close()

    def _against(self, ceiling: str, subject: Callable[[], float]) -> tuple[list[float], list[float]]:
        rates, found = in_turns(self._settings.num_rounds, lambda: self._machine.rate(ceiling), subject)
        self._samples.setdefault(ceiling, []).extend(rates)
        return rates, found


@torch.inference_mode()
def _library_product(product: Product, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """The fastest product of the library (oneDNN where torch has it) at this shape: weights in the layout it likes best
    for so many rows."""
    rows = torch.randn(product.num_rows, product.num_in).to(dtype)
    weight = torch.randn(product.num_out, product.num_in).to(dtype)
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return lambda: F.linear(rows, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, product.num_rows)
    linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise
    return lambda: linear(rows, packed, None, "none", [], "")


def _dot(values: npt.NDArray[np.float32]) -> float:
    half = len(values) // 2
    return float(np.dot(values[:half], values[half : 2 * half]))


def _begin(spec: dict[str, Any]) -> Worker:
    settings = LimitsSettings(**spec)
    # the cores of the first node
    os.sched_setaffinity(0, settings.core_ids[: settings.num_threads])
    keep_freed_memory()
    return EngineLimits(settings)


if __name__ == "__main__":
    serve_parent(_begin)
