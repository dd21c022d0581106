"""`python -m tests.engine.product_time MODEL`: products of prompts by Baton's kernels and by oneDNN, in turns.

GFLOP/s of the fastest tenth, for each product of a layer and for all of them. One thread is timed by its processor
time, which a busy machine hardly changes; several by the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from baton.bench.limits.model_shapes import Product, shapes_of
from baton.engine.models.config import load_config
from baton.engine.models.identity import find_checkpoint
from baton.engine.models.linear_weights import PlainWeight
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.native.library import open_kernels

_ROUNDS = 30
_ROWS = (256, 512, 2048)


def calls_of(product: Product, ops: NativeOps) -> list[Callable[[], object]]:
    """The product by Baton and by oneDNN, each with its weights packed as it likes them best."""
    rows = torch.randn(product.num_rows, product.num_in).bfloat16()
    weight = torch.randn(product.num_out, product.num_in).bfloat16()
    packed = ops.pack(PlainWeight(weight))
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, product.num_rows)
    multiply: Callable[..., object] = torch.ops.mkldnn._linear_pointwise
    return [lambda: ops.linear(rows, packed, None), lambda: multiply(rows, reordered, None, "none", [], "")]


def fastest_tenth_s(calls: Sequence[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each call, all of them in turns."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, seconds in zip(calls, found, strict=True):
            begun_s = clock()
            call()
            seconds.append(clock() - begun_s)
    return [sorted(seconds)[_ROUNDS // 10] for seconds in found]


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.product_time", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    kernels = open_kernels("auto", asked.threads)
    assert kernels is not None, "these measurements are of compiled kernels"
    ops, shapes = NativeOps(kernels), shapes_of(load_config(find_checkpoint(asked.model)), 2)
    for num_rows in asked.rows:
        all_flop, sums_s = 0, [0.0, 0.0]
        for product in shapes.layer_products(num_rows):
            times_s, flop = fastest_tenth_s(calls_of(product, ops), clock), product.flop // product.count
            all_flop, sums_s = all_flop + flop, [a + b for a, b in zip(sums_s, times_s, strict=True)]
            tell(f"{num_rows} rows, {product.name}", flop, times_s)
        tell(f"{num_rows} rows, all of a layer", all_flop, sums_s)


def tell(what: str, flop: int, times_s: Sequence[float]) -> None:
    """A line of the table."""
    own, other = (flop / each / 1e9 for each in times_s)
    sys.stdout.write(f"{what}: {own:.1f} GFLOP/s, oneDNN {other:.1f} ({own / other:.3f} times as fast)\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
