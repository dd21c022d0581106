"""The bytes of the pool's blocks for `baton.engine.cache.offload`, wherever the pool is.

Owns how they are copied. A block is contiguous over all layers, planes, scales and states, so nothing here knows what
is in one. On a device, copies go by a stream of their own and through pinned memory, and are waited for.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from baton.device.choose import open_stream
from baton.engine.cache.store import BlockBytes
from baton.engine.cache.tiered_pool import PoolBytes
from baton.engine.runner.kv_memory import KvMemory


class HostPoolBytes:
    """Of an array [num_blocks, block_bytes]. See `PoolBytes`."""

    def __init__(self, blocks: BlockBytes) -> None:
        self.block_bytes = blocks.shape[1]
        self._blocks = blocks

    def read(self, block_id: int) -> BlockBytes:
        """The bytes of a block, in the pool's own memory."""
        block: BlockBytes = self._blocks[block_id]
        return block

    def write(self, block_id: int, content: BlockBytes) -> BlockBytes:
        """Overwrite a block with these bytes."""
        self._blocks[block_id] = content
        return self.read(block_id)


class DevicePoolBytes:
    """Of a tensor [num_blocks, block_bytes] on a device. See `PoolBytes`. One copy at a time."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.block_bytes = blocks.shape[1]
        self._blocks = blocks
        self._stream = open_stream(blocks.device)
        self._pinned = self._stream.host_memory(self.block_bytes)
        self._lock = threading.Lock()

    def read(self, block_id: int) -> BlockBytes:
        """The bytes of a block, fetched from the device."""
        with self._lock:
            self._copy(torch.from_numpy(self._pinned), self._blocks[block_id])
            return self._pinned.copy()

    def write(self, block_id: int, content: BlockBytes) -> BlockBytes:
        """Send these bytes into a block on the device."""
        sent = content.copy()
        with self._lock:
            np.copyto(self._pinned, sent)
            self._copy(self._blocks[block_id], torch.from_numpy(self._pinned))
        return sent

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.enter()
        self._stream.copy(target, source)
        self._stream.synchronize()


def pool_bytes(memory: KvMemory) -> PoolBytes:
    """The bytes of what lies in `memory`: its blocks, or this rank's part of them."""
    if isinstance(memory.blocks, torch.Tensor):
        return DevicePoolBytes(memory.blocks)
    return HostPoolBytes(memory.blocks)
