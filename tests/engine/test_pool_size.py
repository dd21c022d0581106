"""The size of the KV pool follows from the settings, or from readings of a GPU's memory, which are given here."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from baton.device.host import HostDevice
from baton.device.host_memory import GIB, HostMemory
from baton.device.memory import MemoryReading
from baton.engine import build, model_shard, pool_size
from baton.engine.capacity import Capacity
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.pool_size import (
    GpuNeeds,
    chosen_num_blocks,
    gpu_num_blocks,
    host_num_blocks,
    measure_needs,
    report_shorter_requests,
    require_room,
)
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.runner.limits import RunnerLimits, graph_sizes
from baton.engine.runner.profiling import profile
from baton.engine.runner.sampler import Sampler
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting
from baton.wire.layout import KvLayout, LayerKv
from tests.checkpoints import make_checkpoint

MIB = 2**20
MARGIN = 64
PER_GIB = GIB // 8192
"""Blocks of `LAYOUT` in a gibibyte."""
LAYOUT = KvLayout.of_layers("float32", 16, [LayerKv(num_kv_heads=2, head_dim=16)] * 2)


# --- from the settings


def test_the_number_of_blocks_beats_the_number_of_bytes() -> None:
    given = 10 * LAYOUT.block_bytes + 1
    assert chosen_num_blocks(EngineSettings(kv_cache_memory_bytes=given), LAYOUT) == 10
    assert chosen_num_blocks(EngineSettings(kv_cache_memory_bytes=given, num_blocks=5), LAYOUT) == 5
    assert chosen_num_blocks(EngineSettings(), LAYOUT) is None


ROOMY = HostMemory(64 * GIB, 60 * GIB)


def host_blocks(settings: EngineSettings, capacity: Capacity, memory: HostMemory = ROOMY, weights: int = 0) -> int:
    return host_num_blocks(settings, LAYOUT, capacity, memory, weights)


def test_a_pool_in_host_memory_holds_what_can_be_used_within_a_gibibyte() -> None:
    settings = EngineSettings(max_num_seqs=4)
    assert host_blocks(settings, Capacity(512, 32, 512, 575)) == 4 * 32
    in_a_gibibyte = 2**30 // LAYOUT.block_bytes
    half = in_a_gibibyte // 2
    assert host_blocks(settings, Capacity(16 * half, half, 512, 575)) == in_a_gibibyte
    assert host_blocks(settings, Capacity(0, in_a_gibibyte + 7, 512, 575)) == in_a_gibibyte + 7
    assert host_blocks(EngineSettings(max_num_seqs=1), Capacity(5, 1, 512, 575)) == 2


def test_a_laptop_has_room_for_two_nodes_whose_model_takes_long_requests() -> None:
    laptop, weights = HostMemory(16 * GIB, 9 * GIB), GIB
    # one request would take 14 GiB; the share of one of two nodes is 0.3 of 9 GiB
    settings, long = EngineSettings(cpu_memory_utilization=0.3), Capacity(16 * 14 * PER_GIB, 14 * PER_GIB, 512, 575)
    assert host_blocks(settings, long, laptop, weights) == int(0.3 * 9 * PER_GIB)
    # with all of it free, the share of the whole less weights and process decides
    assert host_blocks(settings, long, HostMemory(16 * GIB, 16 * GIB), weights) == int((4.8 - 1.5) * PER_GIB)


def test_a_longest_request_that_was_asked_for_has_to_fit_the_host() -> None:
    laptop, long = HostMemory(16 * GIB, 9 * GIB), Capacity(16 * 14 * PER_GIB, 14 * PER_GIB, 512, 575)
    settings = EngineSettings(cpu_memory_utilization=0.3, max_model_len=16 * 14 * PER_GIB)
    with pytest.raises(InvalidSetting, match=r"0\.3 leaves 2\.70 GiB .*9\.0 of 16\.0 GiB are free.* needs 14\.00"):
        host_blocks(settings, long, laptop)


def test_a_pool_that_cannot_be_there_is_refused_before_it_is_touched() -> None:
    require_room(LAYOUT, PER_GIB, HostMemory(16 * GIB, GIB))
    with pytest.raises(InvalidSetting, match=r"needs 2\.00 GiB, and 1\.0 of 16\.0 GiB are free: lower --kv-cache-mem"):
        require_room(LAYOUT, 2 * PER_GIB, HostMemory(16 * GIB, GIB))


def test_shorter_requests_are_said_with_the_flag_that_changes_it(caplog: pytest.LogCaptureFixture) -> None:
    report_shorter_requests(EngineSettings(), LAYOUT, Capacity(112, 7, 512, 575), 7)
    assert not caplog.records
    report_shorter_requests(EngineSettings(), LAYOUT, Capacity(128, 8, 512, 575), 7)
    assert "requests may have 112 tokens instead of 128" in caplog.text
    assert "--kv-cache-memory-bytes makes it larger" in caplog.text


# --- what is left of a GPU, in MiB


def reading(total: int, free: int, reserved: int = 0, peak: int = 0) -> MemoryReading:
    return MemoryReading(total * MIB, free * MIB, reserved * MIB, peak * MIB)


def budget(before: MemoryReading, after: MemoryReading, utilization: float, later: int = 0) -> float:
    return GpuNeeds(before, after, later * MIB).budget(utilization) / MIB


def test_a_share_pays_for_context_weights_peak_and_graphs() -> None:
    # 500 MiB outside torch, 15,000 of weights, 2,000 more at the peak, 300 of graphs
    after = reading(80_000, 79_000 - 500 - 15_000, reserved=15_000, peak=17_000)
    found = budget(reading(80_000, 79_000), after, 0.9, later=300)
    assert found == 72_000 - 500 - 17_000 - 300 - MARGIN


def test_two_nodes_of_one_device_fit_beside_each_other() -> None:
    # the other node has taken all of its share already
    before = reading(80_000, 80_000 - 36_000)
    after = reading(80_000, before.free // MIB - 500 - 15_000, reserved=15_000, peak=17_000)
    assert budget(before, after, 0.45) == 36_000 - 500 - 17_000 - MARGIN


def test_what_another_process_took_meanwhile_is_not_counted_as_ours() -> None:
    after = reading(80_000, 79_000 - 500 - 15_000 - 20_000, reserved=15_000, peak=17_000)
    assert budget(reading(80_000, 79_000), after, 0.45) == 36_000 - 2_048 - 17_000 - MARGIN


def test_no_more_than_is_free_is_promised() -> None:
    before = reading(80_000, 30_000)
    after = reading(80_000, 30_000 - 500 - 15_000, reserved=15_000, peak=17_000)
    assert budget(before, after, 0.9, later=100) == 14_500 - 2_000 - 100 - MARGIN


def test_a_share_that_is_used_up_leaves_nothing() -> None:
    after = reading(80_000, 60_000, reserved=15_000, peak=17_000)
    assert budget(reading(80_000, 79_000), after, 0.2) == 0


# --- the blocks of a GPU


def blocks_within(num_bytes: int, max_model_len: int = 0) -> int:
    """With so many bytes to spend; a request of the limit takes 8 blocks of 16 tokens."""
    total = num_bytes + MARGIN * MIB
    empty = MemoryReading(total, total, 0, 0)
    settings = EngineSettings(block_size=16, max_model_len=max_model_len, gpu_memory_utilization=1.0)
    return gpu_num_blocks(settings, LAYOUT, Capacity(16 * 8, 8, 512, 575), GpuNeeds(empty, empty, 0))


def test_the_pool_of_a_gpu_takes_the_budget_but_for_the_spare_block() -> None:
    assert blocks_within(21 * LAYOUT.block_bytes - 1) == 19


def test_a_longest_request_that_was_asked_for_has_to_fit() -> None:
    assert blocks_within(9 * LAYOUT.block_bytes, max_model_len=128) == 8
    with pytest.raises(InvalidSetting, match=r"--gpu-memory-utilization 1 leaves 0\.00 GiB for KV on a device of 0\.1"):
        blocks_within(8 * LAYOUT.block_bytes, max_model_len=128)


def test_a_longest_request_of_the_models_limit_need_not_fit() -> None:
    assert blocks_within(8 * LAYOUT.block_bytes) == 7
    with pytest.raises(InvalidSetting, match="one request of --max-model-len needs"):
        blocks_within(2 * LAYOUT.block_bytes)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_needs_are_the_largest_step_the_workspace_and_graphs(tmp_path: Path, enforce_eager: bool) -> None:
    config = load_config(make_checkpoint(tmp_path / "model", "qwen3"))
    decoder, device = Decoder(config, torch.float32, torch.device("cpu")), HostDevice()
    limits = RunnerLimits(max_num_seqs=64, max_step_tokens=111, max_blocks_per_request=4)
    before, after, order = reading(10, 9), reading(10, 8), list[str]()

    def noted_reset(where: torch.device) -> None:
        order.append("count from here")

    def noted_profile(*arguments: Any) -> None:
        order.append("largest step")
        profile(*arguments)

    def noted_reading(where: torch.device) -> MemoryReading:
        order.append("read")
        return after

    with (
        mock.patch.object(pool_size, "reset_peak", noted_reset),
        mock.patch.object(pool_size, "profile", noted_profile),
        mock.patch.object(pool_size, "read_memory", noted_reading),
    ):
        sampler, settings = Sampler(frozenset(), config.vocab_size), EngineSettings(enforce_eager=enforce_eager)
        needs = measure_needs(settings, before, decoder, sampler, device, limits, 50 * MIB)
    assert order == ["count from here", "largest step", "read"]
    # logits of 64 sequences in float32, over a vocabulary of 320
    graph_bytes = 0 if enforce_eager else 16 * MIB * len(graph_sizes(64)) + 64 * 320 * 4
    assert needs == GpuNeeds(before, after, 50 * MIB + graph_bytes)


def test_weights_without_room_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    nothing = mock.patch.object(model_shard, "read_host_memory", return_value=HostMemory(16 * GIB, 1000))
    with nothing, pytest.raises(InvalidSetting, match=r"the weights need 0\.00 GiB, and 0\.0 of 16\.0 GiB are free"):
        build.build_engine(EngineSettings(str(folder), num_threads=1), allocate_private)
    # or when they take all of the share that a node may have
    little = EngineSettings(str(folder), num_threads=1, cpu_memory_utilization=0.001)
    free = mock.patch.object(model_shard, "read_host_memory", return_value=HostMemory(16 * GIB, 16 * GIB))
    unread = mock.patch.object(model_shard, "load_weights", side_effect=AssertionError)
    words = r"0\.001 of 16\.00 GiB leaves nothing for KV .*--kv-cache-memory-bytes"
    with free, unread, pytest.raises(InvalidSetting, match=words):
        build.build_engine(little, allocate_private)
