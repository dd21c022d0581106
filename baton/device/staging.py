"""The places of a step's arrays in staging memory: one after another, each at an aligned offset.

Owns the arithmetic, and how bytes are seen as values. The same sequence of dtypes and capacities gets the same offsets,
whatever the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array

ALIGNMENT = 64
"""Bytes; kernels load 16 at once, and no two arrays share a cache line."""
_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Place(NamedTuple):
    """Bytes `begin` .. `end - 1`."""

    begin: int
    end: int


class StagingLayout:
    """Hands out places in `num_bytes` of memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_used_bytes = 0
        self._num_bytes = num_bytes
        self._next = 0

    def reset(self) -> None:
        """Forget all places, for a new step."""
        self._next = self.num_used_bytes = 0

    def place(self, values: Array, capacity: int) -> Place:
        """The place of `values` [n], with room for `capacity` of them. Raises `ValueError`.

        Room behind the last value need not be copied: see `num_used_bytes`.
        """
        if values.ndim != 1:
            raise ValueError(f"values of {values.ndim} dimensions cannot be staged")
        if capacity and len(values) > capacity:
            raise ValueError(f"{len(values)} values do not fit a capacity of {capacity}")
        end = self._next + max(capacity, len(values)) * values.dtype.itemsize
        if end > self._num_bytes:
            raise ValueError(f"a step needs more than the {self._num_bytes} bytes of staging memory")
        begin, self._next = self._next, -(-end // ALIGNMENT) * ALIGNMENT
        self.num_used_bytes = begin + values.nbytes
        return Place(begin, self.num_used_bytes)


class StagedMemory:
    """Host memory and the device memory of the same size that it is copied to, both uint8, filled by the layout.

    Each is viewed once as every dtype there is: a slice of such a view takes a third of the time of one made anew.
    """

    def __init__(self, host: Tensor, device: Tensor) -> None:
        self.layout = StagingLayout(len(host))
        self._views = {dtype: (_as(host, dtype).numpy(), _as(device, dtype)) for dtype in _DTYPES}

    def put(self, values: Array, capacity: int) -> Tensor:
        """Copy `values` [n] to the host memory; the view [n] of where they will be on the device. See `Staging.put`."""
        host, device = self._views[values.dtype]
        place = self.layout.place(values, capacity)
        first, last = place.begin // values.itemsize, place.end // values.itemsize
        host[first:last] = values
        return device[first:last]


def _as(memory: Tensor, dtype: np.dtype[np.generic]) -> Tensor:
    """All whole values of `dtype` in `memory`."""
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(_DTYPES[dtype])


def staged_bytes(count: int, dtype: type[np.generic]) -> int:
    """The bytes that an array of `count` values takes in staging memory."""
    return -(-count * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
