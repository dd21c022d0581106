"""The memory of the "nccl" transport: a pool as a tensor, slots for messages, the copies between them.

Owns how large a message is and how blocks are gathered and scattered, in host memory and on a GPU. Knows no pairs, no
threads and no torch.distributed.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from baton.kvtransfer.runs import coalesce
from baton.kvtransfer.transports.base import Blocks

PIECE_BYTES = 4 * 2**20
DEVICE_PIECE_BYTES = 16 * 2**20
"""On a GPU. A message costs some 100 us of launches and headers on either side, whatever its size, and 4 MiB cross
NVLink in 20 us. Four are in flight at a time; slots for them take 64 MiB of the GPU on either side of a pair."""
NUM_SLOTS = 4
_MAX_PIECE_BLOCKS = 1_024


def pool_tensor(blocks: Blocks | torch.Tensor) -> torch.Tensor:
    """A pool as [num_blocks, block_bytes] uint8 tensor over the same memory.

    This is the one place where memory of a GPU comes in. A contiguous CUDA tensor of that shape is taken as it is, and
    its device makes the pair's backend NCCL.
    """
    return torch.from_numpy(blocks) if isinstance(blocks, np.ndarray) else blocks


def gather(slot: torch.Tensor, pool: torch.Tensor, sources: Sequence[int]) -> None:
    """Copy blocks of the pool into the first places of a slot; on a GPU the copy may still be in flight on return."""
    if pool.is_cpu:
        for run in coalesce(sources, range(len(sources)), len(sources)):
            # numpy's copy is one memcpy; torch's would start worker threads for it
            np.copyto(
                slot[run.target : run.target + run.count].numpy(), pool[run.source : run.source + run.count].numpy()
            )
    else:
        gather_indexed(slot, pool, sources)


def scatter(pool: torch.Tensor, targets: Sequence[int], slot: torch.Tensor) -> None:
    """Copy the first blocks of a slot into the pool; on a GPU the copy may still be in flight on return."""
    if pool.is_cpu:
        for run in coalesce(range(len(targets)), targets, len(targets)):
            np.copyto(
                pool[run.target : run.target + run.count].numpy(), slot[run.source : run.source + run.count].numpy()
            )
    else:
        scatter_indexed(pool, targets, slot)


def gather_indexed(slot: torch.Tensor, pool: torch.Tensor, sources: Sequence[int]) -> None:
    """`gather` in one operation, however scattered the blocks are."""
    indices = torch.tensor(sources, dtype=torch.int64, device=pool.device)
    torch.index_select(_wide(pool), 0, indices, out=_wide(slot)[: len(sources)])


def scatter_indexed(pool: torch.Tensor, targets: Sequence[int], slot: torch.Tensor) -> None:
    """Copy the first blocks of a slot into the pool, as `scatter` does, in one operation of the device."""
    indices = torch.tensor(targets, dtype=torch.int64, device=pool.device)
    _wide(pool).index_copy_(0, indices, _wide(slot)[: len(targets)])


def _wide(blocks: torch.Tensor) -> torch.Tensor:
    """The same blocks in words of 8 bytes, where they are made of such: what copies by index copies them one by one."""
    return blocks.view(torch.int64) if blocks.shape[1] % 8 == 0 and blocks.data_ptr() % 8 == 0 else blocks


def piece_bytes(device: torch.device) -> int:
    """How large a message should be."""
    return DEVICE_PIECE_BYTES if device.type == "cuda" else PIECE_BYTES


def max_piece_blocks(pool: torch.Tensor) -> int:
    """How many blocks a message may hold."""
    return min(_MAX_PIECE_BLOCKS, max(1, piece_bytes(pool.device) // pool.shape[1]))


def open_slots(pool: torch.Tensor) -> list[torch.Tensor]:
    """`NUM_SLOTS` slots, each for one message. On a GPU they belong to the stream on which this is called."""
    shape = (max_piece_blocks(pool), pool.shape[1])
    if not pool.is_cpu:
        return [torch.empty(shape, dtype=torch.uint8, device=pool.device) for _ in range(NUM_SLOTS)]
    # mapped: released to the system with the pair, while a freed array of this size may stay with the process
    maps = [mmap.mmap(-1, shape[0] * shape[1]) for _ in range(NUM_SLOTS)]
    return [torch.frombuffer(slot, dtype=torch.uint8).view(shape) for slot in maps]
