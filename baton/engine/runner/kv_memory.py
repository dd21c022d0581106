"""The KV pool's bytes, and the views of them that attention and transfers use.

Owns the memory: block-major, so that block i over all layers is bytes i * block_bytes .. (i + 1) * block_bytes of one
region. `KvLayout` describes a block, and `baton.engine.cache.block_pool` knows which blocks are in use.

Letters: B blocks.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from ctypes import CDLL, c_size_t, c_void_p
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.device.base import Device, DeviceFailed
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.models.decoder import TORCH_DTYPES
from baton.engine.models.shard import WHOLE, Shard
from baton.wire.errors import InvalidSetting
from baton.wire.layout import DTYPE_BYTES, KvLayout

ByteArray: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class SharedRegion:
    """An array of bytes, and the open file that other processes map the same memory by."""

    array: ByteArray
    descriptor: int


KvAllocator: TypeAlias = Callable[[int], ByteArray | SharedRegion]
"""Gives a writable, page-aligned array of that many bytes: private memory, or one that other processes can map, as a
segment of a transport is."""

_PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class KvMemory:
    """`num_blocks` blocks of `layout`.

    `blocks`: [B, block_bytes] uint8, what transfers read and write: an array of the host, or a tensor of a device.
    `give_memory`: has the system give all pages of the blocks from one to before another; None: they have them.
    `paged`: what attention reads and writes. Same bytes; with a `spare_block` it has that one block more, which belongs
    to no request and is never transferred: padding rows of recorded steps use it. `descriptor`: an open file by which
    other processes of this node map the same memory; None: it is private. `shard`: what of each block lies here, and in
    `blocks` nothing else; the rest lies in the pools of other ranks.
    """

    layout: KvLayout
    num_blocks: int
    blocks: ByteArray | torch.Tensor
    paged: PagedKv
    spare_block: int | None = None
    descriptor: int | None = None
    shard: Shard = WHOLE
    give_memory: Callable[[int, int], None] | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have the rest of each block in pools of their own."""
        return not self.shard.is_whole

    @property
    def begun_part(self) -> torch.Tensor:
        """[B, elements of the model's layers, of all stages]: what is to be wiped where a step begins a block. KV of a
        draft may be in it already."""
        return self.paged.own_part if self.paged.shard.num_stages == 1 else self.paged.blocks


def host_kv_memory(
    layout: KvLayout,
    num_blocks: int,
    allocate: KvAllocator,
    *,
    own: KvLayout | None = None,
    shard: Shard = WHOLE,
) -> KvMemory:
    """KV in host memory that `allocate` gives, whose pages come with `give_memory`. `own`: what the model stores of it
    here, see `PagedKv`."""
    region = allocate(num_blocks * layout.block_bytes)
    memory, descriptor = (region.array, region.descriptor) if isinstance(region, SharedRegion) else (region, None)
    blocks: ByteArray = memory.reshape(num_blocks, layout.block_bytes)
    paged = _part(_paged(torch.from_numpy(memory), layout), own or layout, shard)
    give = partial(_give, blocks, descriptor)
    return KvMemory(layout, num_blocks, blocks, paged, descriptor=descriptor, give_memory=give)


def _give(blocks: ByteArray, descriptor: int | None, first: int, end: int) -> None:
    """Raises `DeviceFailed` when the system has no more memory for what processes share: touching it would end this
    one."""
    if descriptor is not None:
        try:
            os.posix_fallocate(descriptor, first * blocks.shape[1], (end - first) * blocks.shape[1])
        except OSError as error:
            raise DeviceFailed(f"no shared memory for more of the KV pool ({error.strerror})") from None
    _populate(blocks[first:end].reshape(-1))


def own_kv_memory(layout: KvLayout, own: KvLayout, shard: Shard, num_blocks: int, device: Device) -> KvMemory:
    """KV that is a rank's alone, with `own` of each block of `layout`: in memory of `device`, or in host memory, which
    a transport's agent process may map."""
    if device.has_own_memory:
        memory_of_device = device_kv_memory(own, num_blocks, device.torch_device)
        return replace(memory_of_device, layout=layout, shard=shard)
    region = allocate_shared(num_blocks * own.block_bytes)
    memory = region.array
    _populate(memory)
    blocks: ByteArray = memory.reshape(num_blocks, own.block_bytes)
    paged = _paged(torch.from_numpy(memory), own)
    return KvMemory(layout, num_blocks, blocks, paged, descriptor=region.descriptor, shard=shard)


def _populate(memory: ByteArray) -> None:
    """Have the system give all pages now: a cold one costs ten times a warm one, and the first step would pay."""
    begin, end = memory.ctypes.data // _PAGE_BYTES * _PAGE_BYTES, memory.ctypes.data + memory.nbytes
    try:
        # page by page, as it is done where the system has no such call, a segment takes two to three times as long
        has_all = CDLL(None).madvise(c_void_p(begin), c_size_t(end - begin), _MADV_POPULATE_WRITE) == 0
    except AttributeError:
        has_all = False
    if not has_all:
        memory[::_PAGE_BYTES] = 0


def mapped_kv(layout: KvLayout, own: KvLayout, shard: Shard, num_bytes: int, descriptor: int) -> PagedKv:
    """The blocks that the driver of a rank has allocated, as that rank sees them. Raises `OSError` and `ValueError`
    when the file does not have that many bytes."""
    memory: ByteArray = np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
    return _part(_paged(torch.from_numpy(memory), layout), own, shard)


def device_kv_memory(layout: KvLayout, num_blocks: int, device: torch.device, own: KvLayout | None = None) -> KvMemory:
    """KV in memory of `device`, with a spare block. `own`: what the model stores of it, see `PagedKv`."""
    memory = torch.zeros((num_blocks + 1) * layout.block_bytes, dtype=torch.uint8, device=device)
    blocks = memory[: num_blocks * layout.block_bytes].view(num_blocks, layout.block_bytes)
    return KvMemory(layout, num_blocks, blocks, _part(_paged(memory, layout), own or layout), num_blocks)


def _paged(memory: torch.Tensor, layout: KvLayout) -> PagedKv:
    elements_per_block = layout.block_bytes // DTYPE_BYTES[layout.dtype]
    elements = memory if layout.has_scales else memory.view(TORCH_DTYPES[layout.dtype])
    return PagedKv(layout, elements.view(-1, elements_per_block))


def _part(paged: PagedKv, own: KvLayout, shard: Shard = WHOLE) -> PagedKv:
    """The part of blocks of a whole layout that is the model's here."""
    if own == paged.layout and shard.is_whole:
        return paged
    first_layer = 0 if shard.num_stages == 1 else shard.layers_of(paged.layout.num_layers).start
    return PagedKv(own, paged.blocks, paged.layout, shard, first_layer=first_layer)


def allocate_shared(num_bytes: int) -> SharedRegion:
    """Memory without a name that processes of this one can map by its descriptor. Raises `InvalidSetting` where the
    system has none."""
    if not hasattr(os, "memfd_create"):
        raise InvalidSetting("a node of several ranks: this system has no memory that processes share without a name")
    descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
    os.truncate(descriptor, num_bytes)
    return SharedRegion(np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8), descriptor)


def populated(num_bytes: int) -> ByteArray:
    """As `allocate_private`, with all its pages."""
    memory = allocate_private(num_bytes)
    _populate(memory)
    return memory


def allocate_private(num_bytes: int) -> ByteArray:
    """Anonymous memory of this process, in huge pages where the system has them."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)
