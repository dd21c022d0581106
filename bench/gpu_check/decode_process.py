"""Decode steps of models with random weights, against the bytes that they have to read.

The floor is (weights + the contexts' keys and values) over the fastest stream that this device was measured at in the
same process. The time of a step is the host's: from one step to the next, so whatever the host adds is in it.
"""

from __future__ import annotations

from bench.gpu_check.floors import decode_floor_ms
from bench.gpu_check.parts_process import NoiseEngines, Setup
from bench.gpu_check.plan import DECODE_BATCHES
from bench.gpu_check.rows import Row, figure_row, limit_row, missing_row, time_row
from bench.gpu_check.shapes import model_shapes
from bench.gpu_check.steps_process import ONE_BY_ONE, DecodeTimes, EngineSteps
from bench.gpu_check.timing_process import Stopwatch, copy_gb_per_s, device_busy_ms, read_gb_per_s, stream_bytes
from bench.stats import median, percentile
from device.base import Device

_TARGET_SHARE = 0.75
_TARGET_BATCHES = {"8B": (1, 64)}
_MOST_OVERHEAD_US = 300.0
_CONTEXT = 1024
_NUM_STEPS = 60
_NUM_PROFILED = 20
_SPARE_TOKENS = 256


class DecodeBench:
    """See `Bench`. Checks are named after models."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._device: Device = setup.open()
        self._engines = NoiseEngines(setup)
        self._context = _CONTEXT if setup.is_gpu else 48
        self._rate_gb_per_s = 0.0

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        rows = [] if self._rate_gb_per_s else self._rates()
        batches = DECODE_BATCHES if self._setup.is_gpu else DECODE_BATCHES[:2]
        num_tokens = self._context + _SPARE_TOKENS
        engine = self._engines.build(
            self._setup.model(name),
            block_size=16,
            max_model_len=num_tokens,
            num_blocks=2 + max(batches) * -(-num_tokens // 16),
            max_num_seqs=max(batches),
            gpu_memory_utilization=0.9,
        )
        steps = EngineSteps(engine)
        for batch in batches:
            rows += self._batch_rows(name, steps, batch)
        return rows

    def close(self) -> None:
        """See `Bench.close`."""
        self._engines.close()
        self._device.close()

    def _rates(self) -> list[Row]:
        """Measures the device's streams; the faster one is the yardstick."""
        watch = Stopwatch(self._device.torch_device, quick=self._setup.is_quick)
        copy = copy_gb_per_s(self._device.torch_device, watch)
        read = read_gb_per_s(self._device.torch_device, watch)
        self._rate_gb_per_s = max(copy, read)
        size = f"{stream_bytes(self._device.torch_device) / 2**20:.0f} MiB"
        return [
            figure_row("memory: copy", size, copy, "GB/s", "bytes read and bytes written"),
            figure_row("memory: read", size, read, "GB/s", "a matrix times a vector"),
        ]

    def _batch_rows(self, name: str, steps: EngineSteps, batch: int) -> list[Row]:
        case = f"{self._setup.label(name)}, batch {batch}, context {self._context}"
        times = steps.decode(batch, self._context, _NUM_STEPS if self._setup.is_gpu else 4)
        step_ms = median(times.step_ms)
        floor_ms = decode_floor_ms(model_shapes(self._setup.model(name)), times.context_lens, self._rate_gb_per_s)
        share = _TARGET_SHARE if batch in _TARGET_BATCHES.get(name, ()) else 0.0
        note = f"p99 {percentile(times.step_ms, 99):.3g} ms, {batch / step_ms * 1e3:.0f} tok/s"
        alone_ms = median(steps.decode(batch, self._context, len(times.step_ms) // 2, ONE_BY_ONE).step_ms)
        waiting = f"{(alone_ms - step_ms) * 1e3:.0f} us more; a penalty is computed too"
        return [
            time_row("decode step", case, step_ms, "ms", floor_ms, share, note),
            self._overhead(case, steps, times),
            time_row("decode step, not overlapped", case, alone_ms, "ms", floor_ms, note=waiting),
        ]

    def _overhead(self, case: str, steps: EngineSteps, times: DecodeTimes) -> Row:
        """What a step takes beyond the time in which the device computes it."""
        if not self._setup.is_gpu:
            return missing_row("overhead of a step", case, "there is no device beside the host")
        batch = len(times.context_lens)
        with steps.decoding(batch, self._context):
            steps.advance(batch, 4)
            busy_ms = device_busy_ms(lambda: steps.advance(batch, _NUM_PROFILED))
        if busy_ms is None:
            return missing_row("overhead of a step", case, "the profiler saw no work of the device")
        overhead_us = (median(times.step_ms) - busy_ms / _NUM_PROFILED) * 1e3
        note = f"the device is busy for {busy_ms / _NUM_PROFILED:.3g} ms of a step"
        return limit_row("overhead of a step", case, overhead_us, "us", _MOST_OVERHEAD_US, note)


def open_bench(setup: Setup) -> DecodeBench:
    """See `bench.gpu_check.worker_process`."""
    return DecodeBench(setup)
