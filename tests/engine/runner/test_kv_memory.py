from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np
import pytest
import torch

from baton.device.base import DeviceFailed
from baton.engine.runner.kv_memory import (
    ByteArray,
    allocate_private,
    allocate_shared,
    device_kv_memory,
    host_kv_memory,
)
from baton.wire.layout import DTYPE_BYTES, FP8_E4M3, KvLayout, LayerKv

CPU = torch.device("cpu")
PLAIN = sorted(set(DTYPE_BYTES) - {FP8_E4M3})


def mixed(dtype: str) -> KvLayout:
    """Three layers of two shapes."""
    return KvLayout.of_layers(dtype, 4, [LayerKv(3, 8), LayerKv(1, 16, window=5), LayerKv(3, 8)])


@pytest.mark.parametrize("dtype", PLAIN)
def test_layers_of_a_block_are_one_row_of_bytes_in_their_order(dtype: str) -> None:
    layout = mixed(dtype)
    memory = host_kv_memory(layout, 5, allocate_private)
    assert isinstance(memory.blocks, np.ndarray)
    assert memory.blocks.shape == (5, layout.block_bytes)
    layers = [memory.paged.layer(layer) for layer in range(3)]
    assert [layer.shape for layer in layers] == [(5, 2, 3, 4, 8), (5, 2, 1, 4, 16), (5, 2, 3, 4, 8)]
    for layer in layers:
        layer[3] = torch.randn(layer[3].shape)
    in_order = torch.cat([layer[3].reshape(-1).view(torch.uint8) for layer in layers])
    assert memory.blocks[3].tobytes() == in_order.numpy().tobytes()
    assert not memory.blocks[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_draft_has_the_last_layers_of_each_block_and_the_model_those_before(dtype: str) -> None:
    own = mixed(dtype)
    draft = KvLayout.of_layers(dtype, 4, [LayerKv(2, 8), LayerKv(1, 4)])
    layout = own.followed_by(draft.layers)
    whole = host_kv_memory(layout, 5, allocate_private).paged
    for memory in (host_kv_memory(layout, 5, allocate_private, own=own), device_kv_memory(layout, 5, CPU, own)):
        model, behind = memory.paged, memory.paged.last_layers(draft)
        assert (model.layout, behind.layout) == (own, draft)
        assert memory.blocks.shape == (5, layout.block_bytes)
        model.own_part[2], behind.own_part[2] = 1, 2
        parts = [whole.heads(layer) for layer in range(5)]
        assert [model.heads(layer).shape[1:] for layer in range(3)] == [part.shape[1:] for part in parts[:3]]
        assert [behind.heads(layer).shape[1:] for layer in range(2)] == [part.shape[1:] for part in parts[3:]]
        assert all(torch.all(model.heads(layer)[2] == 1) for layer in range(3))
        assert all(torch.all(behind.heads(layer)[2] == 2) for layer in range(2))
        assert torch.all(memory.paged.blocks[2] > 0)
        assert not memory.paged.blocks[[0, 1, 3, 4]].any()


def test_bytes_copied_into_a_block_are_its_kv() -> None:
    layout = mixed("float32")
    source, target = (host_kv_memory(layout, 2, allocate_private) for _ in range(2))
    source.paged.blocks[0] = torch.arange(512.0)
    target.blocks[1] = source.blocks[0]
    for layer in range(3):
        assert torch.equal(target.paged.layer(layer)[1], source.paged.layer(layer)[0])


@pytest.mark.parametrize("has_call", [True, False])
def test_blocks_get_their_pages_when_they_are_given(has_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_call:
        monkeypatch.setattr("baton.engine.runner.kv_memory._MADV_POPULATE_WRITE", -1)
    memory = host_kv_memory(mixed("float32"), 400, allocate_shared)
    assert isinstance(memory.blocks, np.ndarray)
    assert memory.give_memory is not None
    assert memory.descriptor is not None
    block_bytes = memory.layout.block_bytes
    memory.blocks[99] = 7
    memory.give_memory(100, 300)
    assert not any(resident(memory.blocks[:98]))
    assert all(resident(memory.blocks[100:300]))
    assert not any(resident(memory.blocks[301 + mmap.PAGESIZE // block_bytes :]))
    assert (memory.blocks[99] == 7).all()
    assert 200 * block_bytes <= os.fstat(memory.descriptor).st_blocks * 512 < 220 * block_bytes


def test_a_pool_without_room_for_more_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, begin: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = host_kv_memory(mixed("float32"), 4, allocate_shared)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    assert memory.give_memory is not None
    with pytest.raises(DeviceFailed, match="No space left"):
        memory.give_memory(0, 4)


def resident(blocks: ByteArray) -> list[bool]:
    """Which pages of memory the system has given."""
    address = blocks.ctypes.data
    first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + blocks.nbytes
    found = (ctypes.c_ubyte * -(-(end - first) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), found) == 0
    return [bool(page & 1) for page in found]


@pytest.mark.parametrize("dtype", PLAIN)
def test_memory_of_a_device_has_a_spare_block_that_transfers_do_not_see(dtype: str) -> None:
    layout = mixed(dtype)
    memory = device_kv_memory(layout, 5, torch.device("cpu"))
    assert isinstance(memory.blocks, torch.Tensor)
    assert memory.spare_block == 5
    assert memory.blocks.shape == (5, layout.block_bytes)
    memory.paged.blocks[5] = 1.0
    assert not memory.blocks.any()
    memory.paged.blocks[4] = torch.randn(memory.paged.blocks[4].shape)
    assert torch.equal(memory.blocks[4], memory.paged.blocks[4].view(torch.uint8))
