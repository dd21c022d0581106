"""`python -m tests.engine.attention.decode_time`: how long attention of decode steps takes on one thread, over KV in
bfloat16 and in codes of 8 bits. Each shape takes its own pool, which is larger than any cache. Both kinds take turns.

Each line is a shape: the least milliseconds of a step, how fast memory was read, and the share of bfloat16's time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.device.host import HostStaging
from baton.engine.attention.base import SequenceShare
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.native.library import Kernels, levels, load_library
from baton.wire.layout import FP8_E4M3, KvLayout, LayerKv

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
LEAST_BYTES = 160 << 20
"""Of a pool in bfloat16: several times what the last cache holds."""


@dataclass(frozen=True)
class Shape:
    """Of a step: its sequences, the tokens that each sees, and a layer's heads."""

    batch: int
    context: int
    num_kv_heads: int
    group: int
    head_dim: int


SHAPES = (
    *(Shape(1, 8192, 8, group, 128) for group in (1, 2, 4, 8)),
    *(Shape(1, 8192, heads, 2, size) for heads, size in ((8, 64), (4, 256))),
    *(Shape(batch, 8192 // batch, 8, 2, 128) for batch in (4, 16)),
    Shape(1, 300, 8, 2, 128),
)


class Attended:
    """Attention of one step over a pool of `kv_dtype`, in all its layers."""

    def __init__(self, kernels: Kernels, shape: Shape, kv_dtype: str) -> None:
        num_blocks = shape.batch * -(-shape.context // BLOCK_SIZE)
        kv = LayerKv(shape.num_kv_heads, shape.head_dim)
        layer_bytes = 4 * num_blocks * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim
        self._num_layers = -(-LEAST_BYTES // layer_bytes)
        layout = KvLayout.of_layers(kv_dtype, BLOCK_SIZE, [kv] * self._num_layers)
        # every byte a number: codes, scales and bfloat16 of about 1
        blocks = torch.randint(0x30, 0x40, (num_blocks, layout.block_bytes), dtype=torch.uint8)
        pool = PagedKv(layout, blocks if kv_dtype == FP8_E4M3 else blocks.view(DTYPE))
        if kv_dtype == FP8_E4M3:
            for layer in range(self._num_layers):
                pool.heads(layer)[..., BLOCK_SIZE * shape.head_dim :] = 127
        num_heads = shape.num_kv_heads * shape.group
        self._attention = NativeAttention(kernels, pool, num_heads, (), DTYPE)
        tables = torch.randperm(num_blocks).view(shape.batch, -1).tolist()
        self._attention.plan([SequenceShare(shape.context - 1, 1, table) for table in tables], HostStaging())
        self._q = torch.randn(shape.batch, num_heads, shape.head_dim).to(DTYPE)
        self._k = torch.randn(shape.batch, shape.num_kv_heads, shape.head_dim).to(DTYPE)
        self.num_bytes = pool.blocks.nbytes

    def step_s(self) -> float:
        """Seconds of this thread for all layers."""
        begin = time.thread_time()
        for layer in range(self._num_layers):
            self._attention.run(layer, self._q, self._k, self._k)
        return time.thread_time() - begin


def measure(kernels: Kernels, shape: Shape, rounds: int) -> str:
    """A line of the table."""
    kinds = [Attended(kernels, shape, kv_dtype) for kv_dtype in ("bfloat16", FP8_E4M3)]
    times = [min(pair) for pair in zip(*([kind.step_s() for kind in kinds] for _ in range(rounds)), strict=True)]
    speeds = [kind.num_bytes / best / 1e9 for kind, best in zip(kinds, times, strict=True)]
    numbers = (shape.batch, shape.context, shape.num_kv_heads, shape.group, shape.head_dim)
    measured = [f"{1e3 * best:.2f} ms ({speed:.1f} GB/s)" for best, speed in zip(times, speeds, strict=True)]
    return f"| {' | '.join(map(str, numbers))} | {' | '.join(measured)} | {times[1] / times[0]:.2f} |"


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--level", default=levels(load_library())[0], help="dispatch level (default: the best)")
    chosen = parser.parse_args(arguments)
    kernels = Kernels(load_library(), 1, chosen.level)
    sys.stdout.write("| batch | context | KV heads | group | head size | bfloat16 | fp8 | fp8 over bfloat16 |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    for shape in SHAPES:
        sys.stdout.write(f"{measure(kernels, shape, chosen.rounds)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
