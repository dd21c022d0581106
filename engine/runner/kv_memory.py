"""The KV pool's bytes, and the views of them that attention and transfers use.

Owns the memory and its layout: block-major, so that block i over all layers is bytes i * block_bytes ..
(i + 1) * block_bytes of one region. Does not know which blocks are in use (`engine.cache.block_pool`).

Letters: B blocks, L layers, Hkv key and value heads, D head size.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.api.layout import KvLayout

ByteArray: TypeAlias = npt.NDArray[np.uint8]
KvAllocator: TypeAlias = Callable[[int], ByteArray]
"""Gives a writable, page-aligned array of that many bytes: private memory, or a shared segment of a transport."""

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PAGE_BYTES = 4096


class KvMemory:
    """`num_blocks` blocks of `layout` in host memory.

    `blocks`: [B, block_bytes] uint8, what transfers read and write.
    `tensor`: [B, L, 2, Hkv, block_size, D] in the layout's dtype, what attention reads and writes. Same bytes.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, allocate: KvAllocator) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        memory = allocate(num_blocks * layout.block_bytes)
        # a cold page costs ten times a warm one: pay at start, not inside the first requests
        memory[::_PAGE_BYTES] = 0
        self.blocks: ByteArray = memory.reshape(num_blocks, layout.block_bytes)
        self.tensor = (
            torch.from_numpy(memory)
            .view(TORCH_DTYPES[layout.dtype])
            .view(num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        )


def allocate_private(num_bytes: int) -> ByteArray:
    """Anonymous memory of this process, in huge pages where the system has them."""
    region = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)
