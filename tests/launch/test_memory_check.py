from __future__ import annotations

from pathlib import Path

import pytest

from baton.device.host_memory import HostMemory
from baton.engine.models.config import load_config
from baton.launch.memory_check import PROCESS_BYTES, require_memory_for_nodes
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint


def test_weights_of_all_nodes_have_to_fit_what_is_free(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    config, num_bytes = load_config(folder), (folder / "model.safetensors").stat().st_size
    needed = 2 * num_bytes + 4 * PROCESS_BYTES
    require_memory_for_nodes(folder, config, "auto", 2, 4, HostMemory(2**34, needed))
    with pytest.raises(
        InvalidSetting,
        match=r"2 nodes need 0\.00 GiB each .* 0\.62 GiB for their 4 processes, and 0\.6 of 16\.0 GiB are free",
    ):
        require_memory_for_nodes(folder, config, "float32", 2, 4, HostMemory(2**34, needed))


def test_files_that_are_not_there_are_left_to_the_nodes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    require_memory_for_nodes(folder, load_config(folder), "auto", 2, 2, HostMemory(2**34, 0))


def test_processes_need_memory_whatever_their_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidSetting, match=r"40\.16 GiB for their 257 processes"):
        require_memory_for_nodes(folder, load_config(folder), "auto", 257, 257, HostMemory(2**36, 2**34))
