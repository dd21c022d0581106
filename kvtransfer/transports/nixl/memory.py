"""The memory of a pool as nixl knows it: addresses, the kind of memory, and on a GPU which one.

Owns the description and what a thread needs to do for memory of that kind before it works on it and after it has
stopped. Knows neither nixl nor torch: what CUDA has to be asked is in `baton.device.cuda_context`, imported for memory
of a GPU only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.wire.errors import InvalidSetting

DRAM, VRAM = "DRAM", "VRAM"
"""Kinds of memory, by nixl's names: of the host, of a GPU."""


@dataclass(frozen=True, slots=True)
class Region:
    """`num_blocks` blocks of equal size that follow each other, `num_bytes` in all. `device_index`: which GPU as CUDA
    counts them in the process that owns the memory; 0 for the host's.
    """

    base_address: int
    num_bytes: int
    num_blocks: int
    kind: str = DRAM
    device_index: int = 0

    def whole(self) -> npt.NDArray[np.uint64]:
        """The one descriptor of the whole region, [1, 3]: address, size, device."""
        return np.array([[self.base_address, self.num_bytes, self.device_index]], dtype=np.uint64)

    def blocks(self) -> npt.NDArray[np.uint64]:
        """A descriptor for each block, [num_blocks, 3]: address, size, device."""
        block_bytes = self.num_bytes // self.num_blocks
        blocks = np.empty((self.num_blocks, 3), dtype=np.uint64)
        blocks[:, 0] = self.base_address + np.arange(self.num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        blocks[:, 1] = block_bytes
        blocks[:, 2] = self.device_index
        return blocks

    def runs(self, offsets: Sequence[int], sizes: Sequence[int]) -> BlockRuns:
        """These runs of bytes of a block. Raises `ValueError` for bytes that a block does not have."""
        block_bytes = self.num_bytes // self.num_blocks
        if len(offsets) != len(sizes) or any(
            offset + size > block_bytes for offset, size in zip(offsets, sizes, strict=True)
        ):
            raise ValueError("these are no runs of bytes of a block")
        starts, lengths = np.array(offsets, dtype=np.uint64), np.array(sizes, dtype=np.uint64)
        return BlockRuns(self, block_bytes, starts + np.uint64(self.base_address), lengths)

    def require_shareable(self) -> None:
        """Raise `InvalidSetting` for memory of a GPU that CUDA IPC cannot hand to another process.

        UCX would register it all the same, and carry every block through the host.
        """
        if self.kind == VRAM:
            from baton.device import cuda_context

            if not cuda_context.is_in_one_allocation(self.base_address, self.device_index):
                raise InvalidSetting(
                    "--kv-transport nixl: CUDA IPC cannot share the memory of this pool: start without "
                    "expandable_segments and cudaMallocAsync in PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF)"
                )

    def enter(self) -> None:
        """Make the calling thread one that may work on this memory: on a GPU, bind it to the device's context."""
        if self.kind == VRAM:
            from baton.device import cuda_context

            cuda_context.bind_context(self.device_index)

    def settle(self) -> None:
        """Wait until nothing that this process began reads or writes the memory any more.

        On a GPU a library's copies are in flight after its calls have returned, and go on when it is torn down.
        """
        if self.kind == VRAM:
            from baton.device import cuda_context

            cuda_context.synchronize(self.device_index)


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Runs of bytes of each block of `region`: `starts`, their addresses in its first block, and `lengths`; [R]."""

    region: Region
    block_bytes: int
    starts: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]

    def of(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
        """A descriptor for each run of each of these blocks, [n x R, 3]: address, size, device. Raises `ValueError` for
        a block that the region does not have."""
        if block_ids and max(block_ids) >= self.region.num_blocks:
            raise ValueError("there is no such block")
        found = np.empty((len(block_ids), len(self.starts), 3), dtype=np.uint64)
        found[:, :, 0] = self.starts + (np.array(block_ids, dtype=np.uint64) * np.uint64(self.block_bytes))[:, None]
        found[:, :, 1] = self.lengths
        found[:, :, 2] = self.region.device_index
        return found.reshape(-1, 3)


def region_of(pool: Any) -> Region:
    """The memory of `pool`, a contiguous [num_blocks, block_bytes] uint8 tensor or array. Raises `InvalidSetting`."""
    if isinstance(pool, np.ndarray):
        is_pool = pool.ndim == 2 and pool.dtype == np.uint8 and pool.flags.c_contiguous
        address, kind, device_index = int(pool.ctypes.data), DRAM, 0
    else:
        is_pool = pool.ndim == 2 and pool.element_size() == 1 and pool.is_contiguous()
        address, is_device = int(pool.data_ptr()), pool.device.type == "cuda"
        kind, device_index = (VRAM, int(pool.device.index)) if is_device else (DRAM, 0)
    if not is_pool or not pool.shape[0] or not pool.shape[1]:
        raise InvalidSetting("--kv-transport nixl: a pool is a contiguous [num_blocks, block_bytes] array of bytes")
    return Region(address, int(pool.shape[0]) * int(pool.shape[1]), int(pool.shape[0]), kind, device_index)
