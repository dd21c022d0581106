"""The bytes of blocks, read and written for a KV store, in host memory and where a device has its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.runner.kv_memory import KvMemory, allocate_private, device_kv_memory, host_kv_memory, populated
from baton.engine.runner.pool_bytes import pool_bytes
from baton.wire.layout import DTYPE_BYTES, STATE, KvLayout, LayerKv

NUM_BLOCKS = 4


def memory_of(place: str, dtype: str) -> KvMemory:
    """Layers of two shapes, and a state where a type has one."""
    layers = [LayerKv(3, 8), LayerKv(1, 16, window=5)]
    if dtype != "fp8_e4m3":
        layers.append(LayerKv(3, 24, kind=STATE))
    layout = KvLayout.of_layers(dtype, 4, layers)
    if place == "host":
        return host_kv_memory(layout, NUM_BLOCKS, allocate_private)
    return device_kv_memory(layout, NUM_BLOCKS, torch.device("cpu"))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_block_that_was_read_and_written_elsewhere_is_the_same_for_attention(place: str, dtype: str) -> None:
    memory = memory_of(place, dtype)
    noise = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, memory.layout.block_bytes), dtype=np.uint8)
    torch.as_tensor(memory.blocks).copy_(torch.from_numpy(noise))
    copied = pool_bytes(memory)
    assert copied.block_bytes == memory.layout.block_bytes
    content = copied.read(1).copy()
    assert content.tobytes() == noise[1].tobytes()
    written = copied.write(3, content)
    assert written.tobytes() == content.tobytes()
    kept = memory.paged.blocks.view(torch.uint8)[:NUM_BLOCKS]
    assert torch.equal(kept[3], kept[1])
    assert torch.equal(kept[:3], torch.from_numpy(noise[:3]))


def test_what_was_written_to_a_device_cannot_be_changed_by_who_gave_it() -> None:
    copied = pool_bytes(memory_of("device", "float32"))
    content = np.ones(copied.block_bytes, dtype=np.uint8)
    written = copied.write(0, content)
    content[:] = 2
    assert written.max() == copied.read(0).max() == 1


def test_populated_memory_can_be_written() -> None:
    memory = populated(3 * 4096)
    memory[:] = 7
    assert (memory.nbytes, memory.sum()) == (3 * 4096, 7 * 3 * 4096)
