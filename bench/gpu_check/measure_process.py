"""The process of one measurement: `python -m baton.bench.gpu_check.measure_process GROUP DEVICE "quick"|"" NAME`.

Says every row as it is measured, see `baton.bench.gpu_check.rows.say`; the group "machine" says what torch sees
instead. Owns the dispatch and what is measured within one process: an engine's steps with random weights, and what runs
beside the model's products. The time of a step is the host's: from one step to the next, so whatever the host adds is
in it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from baton.bench.gpu_check.relay_process import exposed_rows, transfer_rows
from baton.bench.gpu_check.rows import Row, failed_row, missing_row, say, say_row, speed_row
from baton.bench.gpu_check.setup_process import Setup, block_bytes, gb_per_s, model_shapes
from baton.bench.limits.engine_process import EngineSteps
from baton.bench.numbers import median, percentile
from baton.kvtransfer.integrity import DOT64
from baton.kvtransfer.pools.device import DevicePool
from baton.wire.errors import InvalidSetting

_WARM_UP_STEPS = 8
_DECODE_SHARE, _DECODE_TARGETS = 0.75, {"8B": (1, 64)}
_PREFILL_SHARES = {"8B": 0.60}
_MOST_OVERHEAD_US = 300.0
_DECODE_BATCHES = (1, 8, 64)
_NUM_PROFILED = 20
_SPARE_TOKENS = 256


def decode_rows(setup: Setup, name: str) -> Iterator[Row]:
    """The floor is (weights + the contexts' keys and values) over the faster stream that the device was measured at."""
    size, copy, read = f"{setup.stream_bytes / 2**20:.0f} MiB", setup.copy_gb_per_s(), setup.read_gb_per_s()
    yield speed_row("memory: copy", size, copy, "GB/s", "bytes read and bytes written")
    yield speed_row("memory: read", size, read, "GB/s", "a matrix times a vector")
    context, num_steps = (1024, 60) if setup.is_gpu else (48, 4)
    batches = _DECODE_BATCHES if setup.is_gpu else _DECODE_BATCHES[:2]
    steps = setup.steps(name, context + _SPARE_TOKENS, max(batches), gpu_memory_utilization=0.9)
    for batch in batches:
        case = f"{setup.label(name)}, batch {batch}, context {context}"
        times = steps.decode(batch, context, num_steps, num_warm_up=_WARM_UP_STEPS)
        step_ms = [taken_s * 1e3 for taken_s in times.step_s]
        lens = times.context_lens[num_steps // 2]
        floor_ms = model_shapes(setup.model(name)).decode_bytes(lens) / max(copy, read) / 1e6
        target = floor_ms / _DECODE_SHARE if batch in _DECODE_TARGETS.get(name, ()) else None
        note = f"p99 {percentile(step_ms, 99):.3g} ms, {batch / median(step_ms) * 1e3:.0f} tok/s"
        yield speed_row("decode step", case, median(step_ms), "ms", note, bound=floor_ms, target=target)
        yield _overhead_row(setup, case, steps, batch, context, median(step_ms))


def decode_ms(steps: EngineSteps, batch: int, context: int, num_steps: int) -> float:
    return median(steps.decode(batch, context, num_steps, num_warm_up=_WARM_UP_STEPS).step_s) * 1e3


def _overhead_row(setup: Setup, case: str, steps: EngineSteps, batch: int, context: int, step_ms: float) -> Row:
    """What a step takes beyond the time in which the device computes it."""
    name = "overhead of a step"
    if not setup.is_gpu:
        return missing_row(name, case, "there is no device beside the host")
    with steps.decoding(batch, context):
        steps.advance(batch, _WARM_UP_STEPS)
        busy_ms = setup.busy_ms(lambda: steps.advance(batch, _NUM_PROFILED))
    if busy_ms is None:
        return missing_row(name, case, "the profiler saw no work of the device")
    note = f"the device is busy for {busy_ms / _NUM_PROFILED:.3g} ms of a step"
    return speed_row(name, case, (step_ms - busy_ms / _NUM_PROFILED) * 1e3, "us", note, target=_MOST_OVERHEAD_US)


def prefill_rows(setup: Setup, name: str) -> Iterator[Row]:
    """The floor: operations over the rate of bfloat16 products with the rows of a chunk, a node's default on a GPU."""
    num_tokens, chunk, num_rounds = (8192, 2048, 5) if setup.is_gpu else (96, 32, 2)
    shapes = model_shapes(setup.model(name))
    rate = setup.gemm_tflop_per_s(shapes.layer_products(chunk))
    yield speed_row("matrix products", f"{setup.label(name)}, {chunk} rows", rate, "TFLOP/s")
    steps = setup.steps(name, num_tokens + 64, 2, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    taken_ms = median([steps.prefill_s(num_tokens) for _ in range(1 + num_rounds)][1:]) * 1e3
    case = f"{setup.label(name)}, {num_tokens} tokens in chunks of {chunk}"
    flop_per_s = shapes.prefill_flop(num_tokens) / taken_ms / 1e9
    note = f"{flop_per_s:.4g} TFLOP/s, {num_tokens / taken_ms * 1e3:.0f} tok/s"
    floor_ms = shapes.prefill_flop(num_tokens) / rate / 1e9
    target = floor_ms / _PREFILL_SHARES[name] if name in _PREFILL_SHARES else None
    yield speed_row("prefill", case, taken_ms, "ms", note, bound=floor_ms, target=target)


def graph_rows(setup: Setup, _: str) -> Iterator[Row]:
    """Recorded decode steps beside eager ones, measured in turns."""
    context, num_steps = (1024, 20) if setup.is_gpu else (32, 2)
    ways = ("eager", "recorded")
    steps = {name: setup.steps("0.6B", context + 512, 8, enforce_eager=name == "eager") for name in ways}
    for batch in (1, 8):
        rounds = [{name: decode_ms(each, batch, context, num_steps) for name, each in steps.items()} for _ in range(3)]
        taken_ms = {name: median([each[name] for each in rounds]) for name in steps}
        case = f"{setup.label('0.6B')}, batch {batch}, context {context}"
        for name in steps:
            yield speed_row(f"decode step, {name}", case, taken_ms[name], "ms")
        yield speed_row("eager over recorded", case, taken_ms["eager"] / taken_ms["recorded"], "times")


def checksum_rows(setup: Setup, _: str) -> Iterator[Row]:
    """Bytes per second of checksums computed on the device."""
    size, count = block_bytes(setup.model("8B")), 512 if setup.is_gpu else 16
    pool = DevicePool(torch.randint(0, 256, (count, size), dtype=torch.uint8, device=setup.torch_device))
    computer, ids = pool.checksums(DOT64), list(range(count))
    step = max(1, min(computer.max_blocks, count))

    def compute() -> None:
        for first in range(0, count, step):
            pending = computer.begin(ids[first : first + step])
            while pending.take() is None:
                continue

    taken_ms = setup.median_ms(compute)
    rate, case = gb_per_s(count * size, taken_ms), f"{count} blocks of {size / 2**20:.3g} MiB"
    yield speed_row("dot64 on the device", case, rate, "GB/s", f"{taken_ms:.3g} ms", bound=setup.read_gb_per_s())


MEASUREMENTS: dict[str, Callable[[Setup, str], Iterable[Row]]] = {
    "device": checksum_rows,
    "graphs": graph_rows,
    "transfer": transfer_rows,
    "decode": decode_rows,
    "prefill": prefill_rows,
    "exposed": exposed_rows,
}
"""By group, each called with the name of what it is to measure."""


def machine(setup: Setup) -> dict[str, Any]:
    """Names and numbers of the device and of torch, or {"missing": why there is no such device}."""
    try:
        device = setup.torch_device
    except InvalidSetting as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if not setup.is_gpu:
        return {**found, "device": "cpu: speeds mean nothing", "num_gpus": 0}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        **found,
        "device": properties.name,
        "num_gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }


def main(group: str, device: str, quick: str, name: str) -> None:
    setup = Setup(device, quick == "quick")
    if group == "machine":
        say(machine(setup))
        return
    try:
        for row in MEASUREMENTS[group](setup, name):
            say_row(row)
    except Exception as error:  # the rows before it stay
        traceback.print_exc()
        say_row(failed_row(group, name, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    say({"done": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
    # no destructors: a library could wait for a device or a peer that has gone
    os._exit(0)
