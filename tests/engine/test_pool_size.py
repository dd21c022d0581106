"""The pool of a GPU follows from readings around the largest step. The readings are given here; the order is ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from device.host import HostDevice
from device.memory import MemoryReading
from engine import build
from engine.attention.choose import AttentionChoice
from engine.capacity import find_capacity
from engine.models.config import load_config
from engine.runner.limits import RunnerLimits, graph_sizes
from engine.runner.profiling import profile
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from wire.errors import InvalidSetting

MIB = 2**20
SETTINGS = EngineSettings(block_size=16, max_num_seqs=64, max_num_batched_tokens=64, gpu_memory_utilization=0.5)
BEFORE = MemoryReading(total=80_000 * MIB, free=79_000 * MIB, reserved=0, peak=0)
AFTER = MemoryReading(total=80_000 * MIB, free=78_900 * MIB, reserved=100 * MIB, peak=300 * MIB)
WORKSPACE_BYTES = 50 * MIB


class Sizing:
    """Sizes the pool of one model, with what happened in which order."""

    def __init__(self, folder: Path) -> None:
        self.order: list[str] = []
        self.after = AFTER
        self._folder = folder

    def num_blocks(self, settings: EngineSettings) -> tuple[int, int]:
        """(blocks, bytes of a block)."""
        model = build._load(settings, self._folder, load_config(self._folder), HostDevice(), None)
        model = replace(model, before=BEFORE)
        capacity = find_capacity(settings, model.decoder.config, is_gpu=True)
        limits = RunnerLimits(settings.max_num_seqs, capacity.num_step_tokens, capacity.blocks_per_request)
        choice = AttentionChoice("flashinfer", WORKSPACE_BYTES, mock.Mock())
        found = build._num_blocks(settings, capacity, model, limits, choice, HostDevice())
        return found, model.layout.block_bytes

    def reset(self, device: torch.device) -> None:
        self.order.append("count from here")

    def read(self, device: torch.device) -> MemoryReading:
        self.order.append("read")
        return self.after


@pytest.fixture
def sizing(tmp_path: Path) -> Iterator[Sizing]:
    sizing = Sizing(make_checkpoint(tmp_path / "model", "qwen3"))

    def noted_profile(*arguments: Any) -> None:
        sizing.order.append("largest step")
        profile(*arguments)

    with (
        mock.patch.object(build, "reset_peak", sizing.reset),
        mock.patch.object(build, "profile", noted_profile),
        mock.patch.object(build, "read_memory", sizing.read),
    ):
        yield sizing


def test_the_pool_gets_what_the_largest_step_the_workspace_and_graphs_leave(sizing: Sizing) -> None:
    num_blocks, block_bytes = sizing.num_blocks(SETTINGS)
    assert sizing.order == ["count from here", "largest step", "read"]
    # a vocabulary of 320: logits of 64 sequences in float32
    graphs = len(graph_sizes(64)) * 16 * MIB + 64 * 320 * 4
    budget = 40_000 * MIB - 300 * MIB - WORKSPACE_BYTES - graphs - 64 * MIB
    assert num_blocks == budget // block_bytes - 1


def test_without_graphs_nothing_is_set_aside_for_them(sizing: Sizing) -> None:
    num_blocks, block_bytes = sizing.num_blocks(replace(SETTINGS, enforce_eager=True))
    assert num_blocks == (40_000 * MIB - 300 * MIB - WORKSPACE_BYTES - 64 * MIB) // block_bytes - 1


def test_a_pool_that_cannot_hold_a_request_is_an_error_or_a_shorter_limit(
    sizing: Sizing, caplog: pytest.LogCaptureFixture
) -> None:
    eager = replace(SETTINGS, enforce_eager=True)
    _, block_bytes = sizing.num_blocks(eager)
    # room for ten blocks and the spare one; a request of the model's limit needs 32
    missing = 40_000 * MIB - 300 * MIB - WORKSPACE_BYTES - 64 * MIB - 11 * block_bytes
    sizing.after = replace(AFTER, peak=AFTER.peak + missing)
    with caplog.at_level(logging.WARNING):
        assert sizing.num_blocks(eager)[0] == 10
    assert "limits requests to 160 tokens" in caplog.text
    with pytest.raises(InvalidSetting, match=r"--gpu-memory-utilization 0\.5 leaves"):
        sizing.num_blocks(replace(eager, max_model_len=400))
