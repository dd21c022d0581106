from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.api.layout import DTYPE_BYTES, KvLayout
from engine.runner.kv_memory import KvMemory, allocate_private


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_block_of_the_tensor_is_one_row_of_bytes(dtype: str) -> None:
    layout = KvLayout(dtype, num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
    memory = KvMemory(layout, 5, allocate_private)
    assert memory.tensor.shape == (5, 2, 2, 3, 4, 8)
    assert memory.blocks.shape == (5, layout.block_bytes)
    memory.tensor[3] = torch.randn(memory.tensor[3].shape)
    assert memory.blocks[3].tobytes() == memory.tensor[3].reshape(-1).view(torch.uint8).numpy().tobytes()
    assert not memory.blocks[[0, 1, 2, 4]].any()


def test_bytes_copied_into_a_block_are_its_kv() -> None:
    layout = KvLayout("float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=2)
    source, target = KvMemory(layout, 2, allocate_private), KvMemory(layout, 2, allocate_private)
    source.tensor[0] = torch.arange(16.0).view(1, 2, 1, 2, 4)
    np.copyto(target.blocks[1], source.blocks[0])
    assert torch.equal(target.tensor[1], source.tensor[0])
