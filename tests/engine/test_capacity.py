"""How long requests and how large steps an engine takes, where its settings say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.capacity import find_capacity
from baton.engine.models.config import ModelConfig, load_config
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position=500)
    return load_config(folder)


def test_a_request_takes_whole_blocks(config: ModelConfig) -> None:
    found = find_capacity(EngineSettings(block_size=16), config, is_gpu=False)
    assert (found.max_model_len, found.blocks_per_request) == (500, 32)
    found = find_capacity(EngineSettings(block_size=16, max_model_len=16), config, is_gpu=False)
    assert (found.max_model_len, found.blocks_per_request) == (16, 1)


@pytest.mark.parametrize(
    ("given", "is_gpu", "expected"), [(0, False, 512), (0, True, 2048), (7, False, 7), (7, True, 7)]
)
def test_a_gpu_takes_larger_chunks_unless_told(config: ModelConfig, given: int, is_gpu: bool, expected: int) -> None:
    found = find_capacity(EngineSettings(max_num_batched_tokens=given, max_num_seqs=9), config, is_gpu=is_gpu)
    assert (found.max_chunk, found.max_step_tokens) == (expected, expected + 8)


def test_a_limit_without_room_for_an_answer_is_refused(config: ModelConfig) -> None:
    with pytest.raises(InvalidSetting, match="--max-model-len 1 has no room"):
        find_capacity(EngineSettings(max_model_len=1), config, is_gpu=True)
