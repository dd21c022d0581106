"""Times of an engine's steps with random weights: decode steps against the bytes that they have to read, prompts
against plain products of the same shapes, recorded steps against eager ones, offline generation against transformers.

The time of a step is the host's: from one step to the next, so whatever the host adds is in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu_check.models import config_of, decode_floor_ms, model_shapes, prefill_floor_ms
from bench.gpu_check.rows import Row, figure_row, least_row, limit_row, missing_row, time_row
from bench.gpu_check.setup_process import Setup
from bench.limits.steps_process import ONE_BY_ONE, EngineSteps
from bench.stats import median, percentile

_WARM_UP_STEPS = 8
_DECODE_SHARE, _DECODE_TARGETS = 0.75, {"8B": (1, 64)}
_PREFILL_SHARES = {"8B": 0.60}
_MOST_OVERHEAD_US = 300.0
_DECODE_BATCHES = (1, 8, 64)
_NUM_PROFILED = 20
_SPARE_TOKENS = 256
_COMPILE_S = 35.0


def decode_rows(setup: Setup, name: str) -> Iterator[Row]:
    """The floor is (weights + the contexts' keys and values) over the faster stream that the device was measured at."""
    watch = setup.stopwatch()
    size, copy, read = f"{watch.stream_bytes() / 2**20:.0f} MiB", watch.copy_gb_per_s(), watch.read_gb_per_s()
    yield figure_row("memory: copy", size, copy, "GB/s", "bytes read and bytes written")
    yield figure_row("memory: read", size, read, "GB/s", "a matrix times a vector")
    context, num_steps = (1024, 60) if setup.is_gpu else (48, 4)
    batches = _DECODE_BATCHES if setup.is_gpu else _DECODE_BATCHES[:2]
    steps = setup.steps(name, context + _SPARE_TOKENS, max(batches), gpu_memory_utilization=0.9)
    for batch in batches:
        case = f"{setup.label(name)}, batch {batch}, context {context}"
        times = steps.decode(batch, context, num_steps, num_warm_up=_WARM_UP_STEPS)
        step_ms = [taken_s * 1e3 for taken_s in times.step_s]
        lens = times.context_lens[num_steps // 2]
        floor_ms = decode_floor_ms(model_shapes(setup.model(name)), lens, max(copy, read))
        share = _DECODE_SHARE if batch in _DECODE_TARGETS.get(name, ()) else 0.0
        note = f"p99 {percentile(step_ms, 99):.3g} ms, {batch / median(step_ms) * 1e3:.0f} tok/s"
        yield time_row("decode step", case, median(step_ms), "ms", floor_ms, share, note)
        yield _overhead_row(setup, case, steps, batch, context, median(step_ms))
        alone_ms = decode_ms(steps, batch, context, num_steps // 2, one_by_one=True)
        note = f"{(alone_ms - median(step_ms)) * 1e3:.0f} us more; a penalty is computed too"
        yield time_row("decode step, not overlapped", case, alone_ms, "ms", floor_ms, note=note)


def decode_ms(steps: EngineSteps, batch: int, context: int, num_steps: int, *, one_by_one: bool = False) -> float:
    """The median time of a step."""
    chosen = {"params": ONE_BY_ONE} if one_by_one else {}
    return median(steps.decode(batch, context, num_steps, num_warm_up=_WARM_UP_STEPS, **chosen).step_s) * 1e3


def _overhead_row(setup: Setup, case: str, steps: EngineSteps, batch: int, context: int, step_ms: float) -> Row:
    """What a step takes beyond the time in which the device computes it."""
    name = "overhead of a step"
    if not setup.is_gpu:
        return missing_row(name, case, "there is no device beside the host")
    with steps.decoding(batch, context):
        steps.advance(batch, _WARM_UP_STEPS)
        busy_ms = setup.stopwatch().busy_ms(lambda: steps.advance(batch, _NUM_PROFILED))
    if busy_ms is None:
        return missing_row(name, case, "the profiler saw no work of the device")
    note = f"the device is busy for {busy_ms / _NUM_PROFILED:.3g} ms of a step"
    return limit_row(name, case, (step_ms - busy_ms / _NUM_PROFILED) * 1e3, "us", _MOST_OVERHEAD_US, note)


def prefill_rows(setup: Setup, name: str) -> Iterator[Row]:
    """The floor is the prompt's operations over the rate of bfloat16 products with as many rows as a chunk has.

    The chunk is what a node uses on a GPU when nobody says.
    """
    num_tokens, chunk, num_rounds = (8192, 2048, 5) if setup.is_gpu else (96, 32, 2)
    shapes = model_shapes(setup.model(name))
    rate = setup.stopwatch().gemm_tflop_per_s(shapes.layer_products(chunk))
    yield figure_row("matrix products", f"{setup.label(name)}, {chunk} rows", rate, "TFLOP/s")
    steps = setup.steps(name, num_tokens + 64, 2, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    taken_ms = median([steps.prefill_s(num_tokens) for _ in range(1 + num_rounds)][1:]) * 1e3
    case = f"{setup.label(name)}, {num_tokens} tokens in chunks of {chunk}"
    flop_per_s = shapes.prefill_flop(num_tokens) / taken_ms / 1e9
    note = f"{flop_per_s:.4g} TFLOP/s, {num_tokens / taken_ms * 1e3:.0f} tok/s"
    floor_ms = prefill_floor_ms(shapes, num_tokens, rate)
    yield time_row("prefill", case, taken_ms, "ms", floor_ms, _PREFILL_SHARES.get(name, 0.0), note)


def graph_rows(setup: Setup) -> Iterator[Row]:
    """Recorded decode steps beside eager ones, measured in turns."""
    context, num_steps = (1024, 20) if setup.is_gpu else (32, 2)
    steps = {
        name: setup.steps("0.6B", context + 512, 8, enforce_eager=enforce_eager)
        for name, enforce_eager in (("eager", True), ("recorded", False))
    }
    for batch in (1, 8):
        rounds = [{name: decode_ms(each, batch, context, num_steps) for name, each in steps.items()} for _ in range(3)]
        taken_ms = {name: median([each[name] for each in rounds]) for name in steps}
        case = f"{setup.label('0.6B')}, batch {batch}, context {context}"
        for name in steps:
            yield figure_row(f"decode step, {name}", case, taken_ms[name], "ms")
        yield figure_row("eager over recorded", case, taken_ms["eager"] / taken_ms["recorded"], "times")


def throughput_rows(setup: Setup, name: str) -> Iterator[Row]:
    """So many prompts of one length at once, each continued by as many tokens, by Baton's engine and by transformers.

    Compiling transformers' forward pass takes longer than everything else here, so it gets a limit of its own.
    """
    work = (32, 256, 64) if setup.is_gpu else (2, 16, 6)
    batch, num_prompt, num_output = work
    case = f"{setup.label(name)}, {batch} x {num_prompt} + {num_output} tokens"
    steps = setup.steps(name, num_prompt + num_output + 16, batch, enable_prefix_caching=False)
    ours = max(steps.generate(*work) for _ in range(3))
    yield figure_row("offline, Baton", case, ours, "tok/s")
    del steps  # its memory
    theirs = _transformers_tok_per_s(setup, name, work, compile_it=False)
    yield figure_row("offline, transformers, static cache", case, theirs, "tok/s")
    yield least_row("Baton over transformers", case, ours / theirs, "times", 1.0)
    if name != "0.6B" or setup.is_quick:
        return
    compiled = _compiled_tok_per_s(setup, name, work)
    if isinstance(compiled, str):
        yield missing_row("offline, transformers, static cache, compiled", case, compiled)
        return
    yield figure_row("offline, transformers, static cache, compiled", case, compiled, "tok/s")
    yield least_row("Baton over compiled transformers", case, ours / compiled, "times", 1.0)


def _compiled_tok_per_s(setup: Setup, name: str, work: tuple[int, int, int]) -> float | str:
    """The rate, or why there is none. A thread that is still compiling ends with this process."""
    if not setup.is_gpu:
        return "transformers compiles with a static cache on a GPU only"
    told: list[float | str] = []

    def measure() -> None:
        try:
            told.append(_transformers_tok_per_s(setup, name, work, compile_it=True))
        except Exception as error:  # whatever a compiler raises is the answer
            told.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}")

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(_COMPILE_S)
    return told[0] if told else f"not compiled within {_COMPILE_S:g} s"


def _transformers_tok_per_s(setup: Setup, name: str, work: tuple[int, int, int], *, compile_it: bool) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    batch, num_prompt, num_output = work
    fields = config_of(setup.model(name))
    config = AutoConfig.for_model(**fields)
    with torch.device(setup.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generation = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=not compile_it,
    )
    ids = torch.randint(0, fields["vocab_size"], (batch, num_prompt), device=setup.device)
    best = 0.0
    for _ in range(3):
        begin_s = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        num_generated = sum(map(len, found[:, num_prompt:].tolist()))  # waits for the device
        best = max(best, num_generated / (time.perf_counter() - begin_s))
    return best
