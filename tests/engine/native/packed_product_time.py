"""How fast products are: `taskset -c 0 python -m tests.engine.native.packed_product_time [LEVEL [ROWS ...]]`.

Prints a table for the layers of Qwen3-0.6B: plain weights, and quantized ones that multiply bfloat16, or rows rounded
to 8 bits, the rounding included. The weights of several layers are multiplied in turns, so that they come from memory.
All kinds are measured in turns; each figure is of the fastest calls. Takes about two minutes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from baton.engine.models.linear_weights import LinearWeight, LoadedWeight, PlainWeight
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.quantization.while_loading import quantization_while_loading
from baton.engine.native.library import Kernels
from tests.engine.native.compiled import library

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
NUM_LAYERS, ROWS = 4, (1, 4, 8, 16, 64, 512, 2048)
SECONDS, MAX_ROUNDS = 2.5, 100
KINDS = (("auto", "auto"), ("int8", "auto"), ("int8", "int8"), ("int4", "auto"), ("int4", "int8"))


@dataclass(frozen=True)
class Kind:
    """Packed weights of all layers."""

    name: str
    ops: NativeOps
    weights: list[LinearWeight]

    def seconds(self, inputs: dict[int, torch.Tensor]) -> list[float]:
        """Of each product: of the processor's time, so that other programs on the core count less."""
        found = []
        for number, weight in enumerate(self.weights):
            begin = time.thread_time()
            self.ops.linear(inputs[SHAPES[number % len(SHAPES)][1]], weight, None)
            found.append(time.thread_time() - begin)
        return found


def packed(kernels: Kernels, quantization: str, activation_dtype: str) -> Kind:
    ops = NativeOps(kernels, rounds_activations=activation_dtype == "int8")
    method, weights = quantization_while_loading(quantization, kernels), []
    for layer in range(NUM_LAYERS):
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(layer)
            plain: LoadedWeight = PlainWeight(torch.randn(shape, generator=generator).to(torch.bfloat16))
            weights.append(ops.pack(method.quantized(plain)))
    return Kind(f"{quantization}, {activation_dtype}", ops, weights)


def fastest(kinds: list[Kind], inputs: dict[int, torch.Tensor]) -> list[float]:
    """Seconds a layer of each kind, from the fastest call of each product; all in turns."""
    found = [[float("inf")] * len(kind.weights) for kind in kinds]
    end = time.perf_counter() + SECONDS * len(kinds)
    for _ in range(MAX_ROUNDS):
        found = [list(map(min, before, kind.seconds(inputs))) for before, kind in zip(found, kinds, strict=True)]
        if time.perf_counter() > end:
            break
    return [sum(each) / NUM_LAYERS for each in found]


def main() -> None:
    level, *counts = sys.argv[1:] or ["avx512_bf16"]
    torch.set_num_threads(1)
    kinds = [packed(Kernels(library(), 1, level), *names) for names in KINDS]
    operations = 2 * sum(num_out * num_in for num_out, num_in in SHAPES)
    sys.stdout.write("| rows | " + " | ".join(f"{kind.name}: ms a layer | GOP/s" for kind in kinds) + " |\n")
    sys.stdout.write("|---:" * (1 + 2 * len(kinds)) + "|\n")
    for rows in map(int, counts or ROWS):
        inputs = {num_in: torch.randn(rows, num_in).to(torch.bfloat16) for _, num_in in SHAPES}
        seconds = fastest(kinds, inputs)
        cells = " | ".join(f"{each * 1e3:.3f} | {rows * operations / each / 1e9:.0f}" for each in seconds)
        sys.stdout.write(f"| {rows:,} | {cells} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
