"""A long prompt through models with random weights, against plain matrix products at the same shapes.

The floor is the prompt's operations over the rate of bfloat16 products, measured in the same process with as many rows
as a chunk of the prompt has.
"""

from __future__ import annotations

from bench.gpu_check.floors import prefill_floor_ms
from bench.gpu_check.parts_process import NoiseEngines, Setup
from bench.gpu_check.rows import Row, figure_row, time_row
from bench.gpu_check.shapes import model_shapes
from bench.gpu_check.steps_process import EngineSteps
from bench.gpu_check.timing_process import Stopwatch, gemm_tflop_per_s
from bench.stats import median

_NUM_TOKENS, _CHUNK = 8192, 2048
"""The chunk is what a node uses on a GPU when nobody says."""
_SMALL_TOKENS, _SMALL_CHUNK = 96, 32
_TARGET_SHARES = {"8B": 0.60}
_NUM_ROUNDS = 5
_SPARE_TOKENS = 64


class PrefillBench:
    """See `Bench`. Checks are named after models."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._device = setup.open()
        self._engines = NoiseEngines(setup)

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        is_gpu = self._setup.is_gpu
        num_tokens, chunk = (_NUM_TOKENS, _CHUNK) if is_gpu else (_SMALL_TOKENS, _SMALL_CHUNK)
        shapes, place = model_shapes(self._setup.model(name)), self._device.torch_device
        watch = Stopwatch(place, quick=self._setup.is_quick)
        rate = gemm_tflop_per_s(place, watch, shapes.layer_products(chunk))
        engine = self._engines.build(
            self._setup.model(name),
            max_model_len=num_tokens + _SPARE_TOKENS,
            num_blocks=2 + 2 * -(-(num_tokens + _SPARE_TOKENS) // 16),
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        steps = EngineSteps(engine)
        steps.prefill_ms(num_tokens)
        taken_ms = median([steps.prefill_ms(num_tokens) for _ in range(_NUM_ROUNDS if is_gpu else 2)])
        case = f"{self._setup.label(name)}, {num_tokens} tokens in chunks of {chunk}"
        floor_ms = prefill_floor_ms(shapes, num_tokens, rate)
        note = (
            f"{shapes.prefill_flop(num_tokens) / taken_ms / 1e9:.4g} TFLOP/s, {num_tokens / taken_ms * 1e3:.0f} tok/s"
        )
        return [
            figure_row("matrix products", f"{self._setup.label(name)}, {chunk} rows", rate, "TFLOP/s"),
            time_row("prefill", case, taken_ms, "ms", floor_ms, _TARGET_SHARES.get(name, 0.0), note),
        ]

    def close(self) -> None:
        """See `Bench.close`."""
        self._engines.close()
        self._device.close()


def open_bench(setup: Setup) -> PrefillBench:
    """See `bench.gpu_check.worker_process`."""
    return PrefillBench(setup)
