"""Where the arrays of a step lie in staging memory: one after another, each at an aligned offset.

Owns the arithmetic only. The same sequence of dtypes and capacities gets the same offsets, whatever the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.device.base import Array

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


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `begin` .. `end - 1` hold values of `dtype`."""

    begin: int
    end: int
    dtype: torch.dtype


class StagingLayout:
    """Hands out places in `num_bytes` of memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_used_bytes = 0
        self._num_bytes = num_bytes
        self._next = 0

    def reset(self) -> None:
        """Start over."""
        self._next = self.num_used_bytes = 0

    def place(self, values: Array, capacity: int) -> Place:
        """Where `values` [n] go, with room for `capacity` of them. Raises `ValueError`.

        What lies behind the last value that is there needs no copy: see `num_used_bytes`.
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
        return Place(begin, self.num_used_bytes, _DTYPES[values.dtype])


def staged_bytes(count: int, dtype: type[np.generic]) -> int:
    """What an array of `count` values takes in staging memory."""
    return -(-count * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
