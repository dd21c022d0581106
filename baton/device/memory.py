"""A GPU's memory: readings of it, and the error for a device that has too little for an engine.

Owns the readings, which are plain numbers. What they mean for the KV pool is `baton.engine.pool_size`'s to say.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton.device.host_memory import GIB, SMALLER, read_host_memory
from baton.wire.errors import InvalidSetting

_REFUSED_BY_HOST = re.compile(r"not enough memory|can't allocate memory")
_ASKED_BYTES = re.compile(r"allocate (\d+) bytes")


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes: of the device, free on it, and held by torch in this process (`reserved` of the device, `peak` in use)."""

    total: int
    free: int
    reserved: int
    peak: int


def read_memory(device: torch.device) -> MemoryReading:
    """The memory of a CUDA device now, after torch has freed what it only caches; `peak` since `reset_peak`."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryReading(total, free, torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Count the peak of the device's memory from now on."""
    torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def enough_memory() -> Iterator[None]:
    """A context for a start. A device or a machine that is too small or too full for it raises `InvalidSetting`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise InvalidSetting(
            f"the device has no memory for this model and its KV: {first_line:.300}; lower --num-blocks, "
            "--kv-cache-memory-bytes or --gpu-memory-utilization, or free the device"
        ) from error
    except (MemoryError, OSError, RuntimeError) as error:
        # torch has no class of its own for memory that the host refuses
        if not _is_refusal(error):
            raise
        asked = _ASKED_BYTES.search(str(error))
        size = f"{int(asked[1]) / GIB:.2f} GiB more were asked for, " if asked else ""
        raise InvalidSetting(
            f"this machine has no memory for this model and its KV: {size}{read_host_memory()}; try {SMALLER}"
        ) from error


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _REFUSED_BY_HOST.search(str(error)) is not None
