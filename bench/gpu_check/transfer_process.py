"""Rates of KV handoffs between two processes with pools in device memory, in turns with a copy of as many bytes.

Owns which sizes are moved. The nodes are those of `baton bench kv`: everything between the stamps is what a prefill and
a decode node run. Handoffs of up to `_MOST_COMPARED` blocks also go into cleared blocks that are compared byte by byte.
"""

from __future__ import annotations

from bench.gpu_check.floors import gb_per_s
from bench.gpu_check.parts_process import Setup, require_transport
from bench.gpu_check.plan import KV_BLOCKS
from bench.gpu_check.rows import Row, count_row, figure_row, rate_row
from bench.gpu_check.shapes import block_bytes
from bench.kv.measure import NodePair
from bench.kv.settings import Plan
from bench.stats import median
from kvtransfer.integrity import DOT64, XXH3
from wire.errors import TransferFailed

_NUM_ROUNDS = 7
_MOST_COMPARED = 64


class TransferBench:
    """See `Bench`. Checks are named after transports."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._block_bytes = block_bytes(setup.model("8B"), 16)
        self._sizes = KV_BLOCKS if setup.is_gpu else (2, 8)

    def check(self, name: str) -> list[Row]:
        """See `Bench.check`."""
        require_transport(name, self._setup)
        rows: list[Row] = []
        num_pool_blocks = max(self._sizes)
        # where no GPU is, staged transports see the host's memory as a device's, and the others as their own
        device = "cuda" if self._setup.is_gpu else "cpu" if name in ("shm", "zmq") else ""
        checksum = DOT64 if device else XXH3
        with NodePair(
            _plan(name, device, self._block_bytes), name, checksum, num_pool_blocks, self._block_bytes
        ) as pair:
            pair.hand_over(0, num_pool_blocks)
            for num_blocks in self._sizes:
                rows += self._size_rows(name, pair, num_blocks)
        return rows

    def close(self) -> None:
        """See `Bench.close`."""

    def _size_rows(self, name: str, pair: NodePair, num_blocks: int) -> list[Row]:
        case = f"{name}, {num_blocks} blocks of {self._block_bytes / 2**20:.3g} MiB"
        copies_s, walls_s = [], []
        for index in range(_NUM_ROUNDS if self._setup.is_gpu else 2):
            first = index * num_blocks % (max(self._sizes) - num_blocks + 1)
            copies_s.append(pair.copy(first, num_blocks))
            walls_s.append(pair.hand_over(first, num_blocks)[0])
        num_bytes, wall_ms, copy_ms = num_blocks * self._block_bytes, median(walls_s) * 1e3, median(copies_s) * 1e3
        overhead_us = (wall_ms - copy_ms) * 1e3
        note = f"{wall_ms:.3g} ms; a copy in the same memory {copy_ms:.3g} ms"
        return [
            *_compared(pair, case, num_blocks),
            rate_row("handoff", case, gb_per_s(num_bytes, wall_ms), "GB/s", gb_per_s(num_bytes, copy_ms), note=note),
            figure_row("handoff, beyond a copy", case, overhead_us, "us"),
        ]


def _compared(pair: NodePair, case: str, num_blocks: int) -> list[Row]:
    """Whether the bytes that arrive are those that were sent; not for sizes whose comparison takes seconds."""
    if num_blocks > _MOST_COMPARED:
        return []
    try:
        pair.hand_over_verified(0, num_blocks)
        num_wrong = 0
    except TransferFailed:
        num_wrong = num_blocks
    return [count_row("handoff, bytes compared", case, num_wrong, num_blocks)]


def _plan(transport: str, device: str, num_bytes: int) -> Plan:
    return Plan(
        transports=(transport,),
        missing={},
        blocks=(),
        block_bytes=num_bytes,
        small_block_bytes=num_bytes,
        checksums=(),
        num_rounds=0,
        cores=None,
        min_pool_bytes=0,
        limit_bytes=0,
        hashing_s=0.0,
        is_quick=True,
        device=device,
    )


def open_bench(setup: Setup) -> TransferBench:
    """See `bench.gpu_check.worker_process`."""
    return TransferBench(setup)
