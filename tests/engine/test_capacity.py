"""What an engine chooses where its settings say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.capacity import Capacity, chosen_num_blocks, device_num_blocks, find_capacity, host_num_blocks
from engine.models.config import ModelConfig, load_config
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from wire.errors import InvalidSetting
from wire.layout import KvLayout, LayerKv

LAYOUT = KvLayout.of_layers("float32", 16, [LayerKv(num_kv_heads=2, head_dim=16)] * 2)


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
def test_a_gpu_takes_larger_steps_unless_told(config: ModelConfig, given: int, is_gpu: bool, expected: int) -> None:
    assert (
        find_capacity(EngineSettings(max_num_batched_tokens=given), config, is_gpu=is_gpu).num_step_tokens == expected
    )


def test_a_negative_step_is_refused(config: ModelConfig) -> None:
    with pytest.raises(InvalidSetting, match="--max-num-batched-tokens must not be negative, got -1"):
        find_capacity(EngineSettings(max_num_batched_tokens=-1), config, is_gpu=True)


def test_the_number_of_blocks_beats_the_number_of_bytes() -> None:
    given = 10 * LAYOUT.block_bytes + 1
    assert chosen_num_blocks(EngineSettings(kv_cache_memory_bytes=given), LAYOUT) == 10
    assert chosen_num_blocks(EngineSettings(kv_cache_memory_bytes=given, num_blocks=5), LAYOUT) == 5
    assert chosen_num_blocks(EngineSettings(), LAYOUT) is None


def test_a_pool_in_host_memory_holds_what_can_be_used_within_a_gibibyte() -> None:
    settings = EngineSettings(max_num_seqs=4)
    assert host_num_blocks(settings, LAYOUT, Capacity(512, 32, 512)) == 4 * 32
    in_a_gibibyte = 2**30 // LAYOUT.block_bytes
    assert (
        host_num_blocks(settings, LAYOUT, Capacity(16 * in_a_gibibyte // 2, in_a_gibibyte // 2, 512)) == in_a_gibibyte
    )
    assert host_num_blocks(settings, LAYOUT, Capacity(0, in_a_gibibyte + 7, 512)) == in_a_gibibyte + 7
    assert host_num_blocks(EngineSettings(max_num_seqs=1), LAYOUT, Capacity(5, 1, 512)) == 2


def test_the_pool_of_a_gpu_takes_the_budget_but_for_the_spare_block() -> None:
    capacity = Capacity(16 * 8, 8, 512)
    asked, unasked = EngineSettings(max_model_len=16 * 8), EngineSettings()
    assert device_num_blocks(21 * LAYOUT.block_bytes - 1, unasked, LAYOUT, capacity) == 19
    assert device_num_blocks(9 * LAYOUT.block_bytes, asked, LAYOUT, capacity) == 8
    assert device_num_blocks(8 * LAYOUT.block_bytes, asked, LAYOUT, capacity) is None
    assert device_num_blocks(8 * LAYOUT.block_bytes, unasked, LAYOUT, capacity) == 7
    assert device_num_blocks(2 * LAYOUT.block_bytes, unasked, LAYOUT, capacity) is None
