"""Times on a device, and what the device can do: copies, reads and matrix products.

Owns how a time is taken: warm-up first, events around many calls, the median of several rounds, operands that rotate
through more memory than the caches hold, random values. Where no GPU is, the same calls by the host's clock.

Times are milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from bench.gpu_check.models import busy_us, gb_per_s, weighted_tflop_per_s
from bench.limits.model_shapes import Product
from bench.stats import median

_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream
_CACHE_TIMES = 8
_WARM_UP_CALLS = 3
_NUM_ROUNDS, _QUICK_ROUNDS = 7, 3
_ROUND_MS = 25.0
_MAX_CALLS = 400
_RECORDED_CALLS = 100
_MAX_ROTATED = 512


class Stopwatch:
    """Times calls on `device`."""

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._num_rounds = _QUICK_ROUNDS if quick else _NUM_ROUNDS
        self._round_ms = _ROUND_MS if self.is_gpu else 1.0

    def median_ms(self, call: Callable[[], object]) -> float:
        """One call, the median over rounds of as many calls as fill a few milliseconds."""
        for _ in range(_WARM_UP_CALLS):
            call()
        num_calls = max(1, min(_MAX_CALLS, int(self._round_ms / max(self._round(call, 1), 1e-4))))
        return median([self._round(call, num_calls) / num_calls for _ in range(self._num_rounds)])

    def recorded_ms(self, call: Callable[[], object]) -> float:
        """As `median_ms`, without the time that the host needs to start each call: many of them as one CUDA graph."""
        if not self.is_gpu:
            return self.median_ms(call)
        beside = _Stream()
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=beside):
            for _ in range(_RECORDED_CALLS):
                call()
        return self.median_ms(graph.replay) / _RECORDED_CALLS

    def stream_bytes(self) -> int:
        """How much the streams below move in one call."""
        return 2**31 if self.is_gpu else 2**22

    def copy_gb_per_s(self) -> float:
        """A large copy within the device's memory: bytes read and bytes written."""
        source, target = self._noise(), self._noise()
        return gb_per_s(2 * source.nbytes, self.median_ms(lambda: target.copy_(source)))

    def read_gb_per_s(self) -> float:
        """A large matrix times a vector, which reads everything and writes next to nothing: like decoding."""
        width = 2**13
        rows = self._noise().view(-1, width)
        vector = torch.randn(width, device=self.device, dtype=rows.dtype)
        return gb_per_s(rows.nbytes, self.median_ms(lambda: torch.mv(rows, vector)))

    def gemm_tflop_per_s(self, products: Sequence[Product]) -> float:
        """The rate of plain bfloat16 products at the shapes of a model, weighted as the model uses them."""
        return weighted_tflop_per_s(products, [self._product_ms(product) for product in products])

    def rotated(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Tensors in turn, together several times as large as the caches."""
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.is_gpu else 2**20
        first = make()
        count = max(2, min(_MAX_ROTATED, -(-_CACHE_TIMES * cache // max(first.nbytes, 1))))
        turns = cycle([first, *(make() for _ in range(count - 1))])
        return lambda: next(turns)

    def busy_ms(self, run: Callable[[], object]) -> float | None:
        """How long the GPU was busy while `run` ran, whatever ran beside each other. None when nothing was seen."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        seen = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        total = busy_us((event.time_range.start, event.time_range.end) for event in seen)
        return total / 1e3 if seen else None

    def _round(self, call: Callable[[], object], num_calls: int) -> float:
        if not self.is_gpu:
            begin_s = time.perf_counter()
            for _ in range(num_calls):
                call()
            return (time.perf_counter() - begin_s) * 1e3
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _product_ms(self, product: Product) -> float:
        rows = torch.randn(product.num_rows, product.num_in, device=self.device).to(torch.bfloat16)
        shape, deviation = (product.num_out, product.num_in), product.num_in**-0.5
        weights = self.rotated(lambda: torch.randn(shape, device=self.device, dtype=torch.bfloat16).mul_(deviation))
        return self.median_ms(lambda: torch.nn.functional.linear(rows, weights()))

    def _noise(self) -> Tensor:
        """`stream_bytes` of bfloat16."""
        return torch.randn(self.stream_bytes() // 2, device=self.device, dtype=torch.bfloat16)
