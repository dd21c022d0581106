"""The KV pool's bytes, and the views of them that attention and transfers use.

Owns the memory: block-major, so that block i over all layers is bytes i * block_bytes .. (i + 1) * block_bytes of one
region. `KvLayout` describes a block, and `engine.cache.block_pool` knows which blocks are in use.

Letters: B blocks.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.paged_kv import PagedKv
from engine.models.decoder import TORCH_DTYPES
from wire.layout import DTYPE_BYTES, KvLayout

ByteArray: TypeAlias = npt.NDArray[np.uint8]
KvAllocator: TypeAlias = Callable[[int], ByteArray]
"""Gives a writable, page-aligned array of that many bytes: private memory, or a shared segment of a transport."""

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KvMemory:
    """`num_blocks` blocks of `layout`.

    `blocks`: [B, block_bytes] uint8, what transfers read and write: an array of the host, or a tensor of a device.
    `paged`: what attention reads and writes. Same bytes; with a `spare_block` it has that one block more, which belongs
    to no request and is never transferred: padding rows of recorded steps use it.
    """

    layout: KvLayout
    num_blocks: int
    blocks: ByteArray | torch.Tensor
    paged: PagedKv
    spare_block: int | None = None


def host_kv_memory(layout: KvLayout, num_blocks: int, allocate: KvAllocator) -> KvMemory:
    """KV in host memory that `allocate` gives."""
    memory = allocate(num_blocks * layout.block_bytes)
    # a cold page costs ten times a warm one: pay at start, not inside the first requests
    memory[::_PAGE_BYTES] = 0
    blocks: ByteArray = memory.reshape(num_blocks, layout.block_bytes)
    return KvMemory(layout, num_blocks, blocks, _paged(torch.from_numpy(memory), layout))


def device_kv_memory(layout: KvLayout, num_blocks: int, device: torch.device) -> KvMemory:
    """KV in memory of `device`, with a spare block."""
    memory = torch.zeros((num_blocks + 1) * layout.block_bytes, dtype=torch.uint8, device=device)
    blocks = memory[: num_blocks * layout.block_bytes].view(num_blocks, layout.block_bytes)
    return KvMemory(layout, num_blocks, blocks, _paged(memory, layout), num_blocks)


def _paged(memory: torch.Tensor, layout: KvLayout) -> PagedKv:
    elements_per_block = layout.block_bytes // DTYPE_BYTES[layout.dtype]
    return PagedKv(layout, memory.view(TORCH_DTYPES[layout.dtype]).view(-1, elements_per_block))


def allocate_private(num_bytes: int) -> ByteArray:
    """Anonymous memory of this process, in huge pages where the system has them."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)
