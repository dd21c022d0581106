"""Devices that a plan can be made for: their memory, its bandwidth, and what they compute at most.

Owns the table of GPUs, and what a plan takes this machine's CPU for. Knows no model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.device.host_memory import GIB, read_host_memory
from baton.engine.models.decoder import TORCH_DTYPES
from baton.runtime.command_line import closest
from baton.wire.errors import InvalidSetting

CPU = "cpu"
_NUM_TRIES = 3
_PRODUCT_SIZE = 512
_COPIED_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """`memory_bytes`: what torch calls its total memory, which is less than the number on the box. `bytes_per_s`: read
    from that memory. `half_flop_per_s` (bfloat16 and float16) and `float_flop_per_s` (float32): of dense products,
    without sparsity. `num_processors`: multiprocessors of a GPU, 0 for the CPU of this machine."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    half_flop_per_s: float
    float_flop_per_s: float
    num_processors: int

    @property
    def is_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.num_processors > 0

    def flop_per_s(self, dtype: str) -> float:
        """The peak for products of that dtype."""
        return self.float_flop_per_s if dtype == "float32" else self.half_flop_per_s


def _gpu(name: str, gib: float, terabytes_per_s: float, half: float, full: float, num_processors: int) -> PlannedDevice:
    """`half`, `full`: in 10^12 operations a second."""
    return PlannedDevice(name, int(gib * GIB), terabytes_per_s * 1e12, half * 1e12, full * 1e12, num_processors)


# Bandwidth and peaks: NVIDIA's data sheets of these products, the SXM form where there are several; where a sheet has
# only the rate with sparsity, half of it. Memory: total_memory of torch on such a device, rounded down.
_GPUS = (
    _gpu("b200", 178.3, 8.0, 2250.0, 75.0, 148),  # HGX B200 data sheet, a GPU of eight
    _gpu("h200", 139.7, 4.8, 989.0, 67.0, 132),  # H200 Tensor Core GPU data sheet
    _gpu("h100", 79.1, 3.35, 989.0, 67.0, 132),  # H100 Tensor Core GPU data sheet, 80 GB
    _gpu("a100", 79.1, 2.039, 312.0, 19.5, 108),  # A100 data sheet, 80 GB
    _gpu("a100-40gb", 39.4, 1.555, 312.0, 19.5, 108),  # A100 data sheet, 40 GB
    _gpu("l40s", 44.3, 0.864, 362.0, 91.6, 142),  # L40S data sheet
    _gpu("l4", 22.0, 0.3, 121.0, 30.3, 58),  # L4 data sheet
    _gpu("rtx-4090", 23.5, 1.008, 165.2, 82.6, 128),  # Ada architecture white paper, float32 sums
)
GPUS = {device.name: device for device in _GPUS}


def find_device(name: str) -> PlannedDevice:
    """The device of that name; `cpu`: this machine, whose rates are measured now. Raises `InvalidSetting`."""
    if name == CPU:
        return _this_machine()
    if name not in GPUS:
        raise InvalidSetting(f"--gpu {name!r:.40} is not one of {', '.join(GPUS)}, {CPU}{closest(name, GPUS)}")
    return GPUS[name]


def _this_machine() -> PlannedDevice:
    """Rates of a fraction of a second on the cores that this process has."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    memory = torch.ones(_COPIED_BYTES // 4)
    bytes_per_s = _COPIED_BYTES / _shortest_s(lambda: memory.sum())
    half, full = (_product_flop_per_s(dtype) for dtype in ("bfloat16", "float32"))
    return PlannedDevice(CPU, read_host_memory().total, bytes_per_s, half, full, num_processors=0)


def _product_flop_per_s(dtype: str) -> float:
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=TORCH_DTYPES[dtype])
    return 2 * _PRODUCT_SIZE**3 / _shortest_s(lambda: square @ square)


def _shortest_s(compute: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(_NUM_TRIES):
        begin_s = time.perf_counter()
        compute()
        taken_s.append(time.perf_counter() - begin_s)
    return min(taken_s)
