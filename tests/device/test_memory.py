from __future__ import annotations

import pytest
import torch

from device.memory import enough_memory
from wire.errors import InvalidSetting


def test_a_start_without_enough_memory_is_a_setting_that_does_not_fit() -> None:
    with pytest.raises(InvalidSetting, match=r"Tried to allocate 2 GiB\.; lower --num-blocks"), enough_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")
