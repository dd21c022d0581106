from __future__ import annotations

from pathlib import Path

import pytest

from device.host_memory import HostMemory
from engine.models.config import load_config
from launch.memory_check import require_memory_for_weights
from tests.checkpoints import make_checkpoint
from wire.errors import InvalidSetting


def test_weights_of_all_nodes_have_to_fit_what_is_free(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    config, num_bytes = load_config(folder), (folder / "model.safetensors").stat().st_size
    require_memory_for_weights(folder, config, "auto", 2, HostMemory(2**34, 2 * num_bytes))
    with pytest.raises(InvalidSetting, match=r"2 nodes need 0\.00 GiB each .* 0\.0 of 16\.0 GiB are free"):
        require_memory_for_weights(folder, config, "float32", 2, HostMemory(2**34, 2 * num_bytes))


def test_files_that_are_not_there_are_left_to_the_nodes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    require_memory_for_weights(folder, load_config(folder), "auto", 2, HostMemory(2**34, 0))
