from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runner.kv_memory import allocate_private, device_kv_memory, host_kv_memory
from wire.layout import DTYPE_BYTES, KvLayout


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_block_of_the_tensor_is_one_row_of_bytes(dtype: str) -> None:
    layout = KvLayout(dtype, num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
    memory = host_kv_memory(layout, 5, allocate_private)
    assert isinstance(memory.blocks, np.ndarray)
    assert memory.tensor.shape == (5, 2, 2, 3, 4, 8)
    assert memory.blocks.shape == (5, layout.block_bytes)
    memory.tensor[3] = torch.randn(memory.tensor[3].shape)
    assert memory.blocks[3].tobytes() == memory.tensor[3].reshape(-1).view(torch.uint8).numpy().tobytes()
    assert not memory.blocks[[0, 1, 2, 4]].any()


def test_bytes_copied_into_a_block_are_its_kv() -> None:
    layout = KvLayout("float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=2)
    source, target = (host_kv_memory(layout, 2, allocate_private) for _ in range(2))
    source.tensor[0] = torch.arange(16.0).view(1, 2, 1, 2, 4)
    target.blocks[1] = source.blocks[0]
    assert torch.equal(target.tensor[1], source.tensor[0])


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_memory_of_a_device_has_a_spare_block_that_transfers_do_not_see(dtype: str) -> None:
    layout = KvLayout(dtype, num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
    memory = device_kv_memory(layout, 5, torch.device("cpu"))
    assert isinstance(memory.blocks, torch.Tensor)
    assert memory.tensor.shape == (6, 2, 2, 3, 4, 8)
    assert memory.spare_block == 5
    assert memory.blocks.shape == (5, layout.block_bytes)
    memory.tensor[5] = 1.0
    assert not memory.blocks.any()
    memory.tensor[4] = torch.randn(memory.tensor[4].shape)
    assert torch.equal(memory.blocks[4], memory.tensor[4].reshape(-1).view(torch.uint8))
