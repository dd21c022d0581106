"""What the machine can do, measured where an engine runs: copy, read, and multiply at a model's own shapes.

Runs in the process of `bench.limits.engine_process` and takes part in its memory settings, cores and threads. Owns two
buffers, much larger than the caches, with every page touched, in huge pages where the system has them.

Each measurement returns seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.limits.model_shapes import Product
from engine.runner.kv_memory import allocate_private


class Machine:
    """`products` are multiplied in `dtype` by as many threads as torch is set to; `num_threads` threads read."""

    def __init__(self, num_bytes: int, num_threads: int, dtype: torch.dtype, products: Sequence[Product]) -> None:
        self._source = allocate_private(num_bytes)
        self._target = allocate_private(num_bytes)
        self._source[:] = self._target[:] = 1
        values = self._source.view(np.float32)
        self._parts = np.array_split(values, num_threads)
        self._others = ThreadPoolExecutor(max(1, num_threads - 1))
        self._multiplications = [(_multiplication(product, dtype), product.count) for product in products]

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    def copy(self, num_passes: int) -> float:
        """One thread copies one buffer to the other, so often."""
        begin_s = time.monotonic()
        for _ in range(num_passes):
            np.copyto(self._target, self._source)
        return time.monotonic() - begin_s

    def read(self, num_passes: int) -> float:
        """The dot product of two halves of each thread's share of a buffer: two streams of loads, no stores."""
        begin_s = time.monotonic()
        for _ in range(num_passes):
            reading = [self._others.submit(_dot, part) for part in self._parts[1:]]
            _dot(self._parts[0])
            for part in reading:
                part.result()
        return time.monotonic() - begin_s

    @torch.inference_mode()
    def multiply(self) -> float:
        """Each product as often as the model has layers."""
        begin_s = time.monotonic()
        for multiply, count in self._multiplications:
            for _ in range(count):
                multiply()
        return time.monotonic() - begin_s


def _dot(values: npt.NDArray[np.float32]) -> float:
    half = len(values) // 2
    return float(np.dot(values[:half], values[half : 2 * half]))


@torch.inference_mode()
def _multiplication(product: Product, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The fastest product of the library at this shape: weights in the layout it likes best for so many rows."""
    rows = torch.randn(product.num_rows, product.num_in).to(dtype)
    weight = torch.randn(product.num_out, product.num_in).to(dtype)
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return lambda: F.linear(rows, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, product.num_rows)

    def multiply() -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        return result

    return multiply
