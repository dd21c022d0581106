"""How large the KV pool may be on a device, from readings of its memory before and after a profiling run.

Owns the arithmetic. Readings are plain numbers, so that it can be tested without a device.

A device's memory is shared by: other processes; this process outside torch (libraries, kernels); weights and what
else stays allocated; what the largest step needs on top (the peak); recorded graphs; and the pool, which gets what is
left of this process's share. The share is `utilization` of the device's whole memory, as in other servers, so two nodes
of one device take 0.45 each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from wire.errors import InvalidSetting

_MARGIN_BYTES = 64 * 2**20
"""Left free whatever was asked for: fragments, and allocations by libraries at their first call."""
_MAX_OUTSIDE_BYTES = 2 * 2**30
"""More than a context and its libraries take: what is missing beyond that went to another process meanwhile."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes: of the device, free on it, and held by torch in this process (`reserved` of the device, `peak` in use)."""

    total: int
    free: int
    reserved: int
    peak: int


def read_memory(device: torch.device) -> MemoryReading:
    """The memory of a CUDA device now, with what torch only caches given back; `peak` since `reset_peak`."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryReading(total, free, torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Count the peak from here on."""
    torch.cuda.reset_peak_memory_stats(device)


def kv_budget(before: MemoryReading, after: MemoryReading, graph_bytes: int, utilization: float) -> int:
    """Bytes for the KV pool, not negative.

    `before`: read when nothing of this process was on the device but its context, which no reading can be without and
    which comes on top of the share; `after`: after weights were loaded and the largest step was computed, with torch's
    cache given back. `graph_bytes`: what recorded graphs are going to take.
    Raises `InvalidSetting` for a utilization that is no share.
    """
    if not 0.0 < utilization <= 1.0:
        raise InvalidSetting(f"--gpu-memory-utilization must be above 0 and at most 1, got {utilization:g}")
    outside_torch = min(max(0, before.free - after.free - after.reserved), _MAX_OUTSIDE_BYTES)
    ours = outside_torch + max(after.peak, after.reserved) + graph_bytes
    of_share = int(after.total * utilization) - ours
    on_top_of_reserved = max(0, after.peak - after.reserved)
    really_free = after.free - on_top_of_reserved - graph_bytes
    return max(0, min(of_share, really_free) - _MARGIN_BYTES)


def too_small(budget: int, needed: int, after: MemoryReading, utilization: float) -> InvalidSetting:
    """The error of a pool that cannot hold one request."""
    return InvalidSetting(
        f"--gpu-memory-utilization {utilization:g} leaves {budget / _GIB:.2f} GiB for KV on a device of "
        f"{after.total / _GIB:.1f} GiB ({after.free / _GIB:.1f} GiB free after loading), one request of "
        f"--max-model-len needs {needed / _GIB:.2f} GiB: raise the first, lower the second, or free the device"
    )


@contextmanager
def enough_memory() -> Iterator[None]:
    """Around a start: a device that is too small or too full for it is an `InvalidSetting`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise InvalidSetting(
            f"the device has no memory for this model and its KV: {first_line:.300}; lower --num-blocks, "
            "--kv-cache-memory-bytes or --gpu-memory-utilization, or free the device"
        ) from error
