"""Puts an engine together: device, checkpoint, KV pool, scheduler, runner.

Owns the order of these: on a GPU the pool gets what is left when weights are loaded and the largest step was computed,
and graphs are recorded last. Everything it makes is handed out; it keeps nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from device.base import Device
from device.choose import open_device
from device.memory import MemoryReading, enough_memory, kv_budget, read_memory, reset_peak, too_small
from engine.attention.choose import AttentionChoice, AttentionShape, choose_attention
from engine.cache.block_pool import BlockPool
from engine.capacity import Capacity, chosen_num_blocks, device_num_blocks, find_capacity, host_num_blocks
from engine.core import EngineCore
from engine.models.checkpoint import choose_dtype
from engine.models.config import ModelConfig, load_config
from engine.models.decoder import TORCH_DTYPES, Decoder
from engine.models.dummy import dummy_fingerprint, fill_with_noise
from engine.models.identity import find_checkpoint, model_fingerprint
from engine.models.loading import load_weights
from engine.runner.kv_memory import KvAllocator, KvMemory, device_kv_memory, host_kv_memory
from engine.runner.limits import RunnerLimits, graph_sizes
from engine.runner.model_runner import ModelRunner
from engine.runner.profiling import profile
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler, SchedulerLimits
from engine.settings import EngineSettings
from wire.layout import KvLayout

_BYTES_PER_GRAPH = 16 * 2**20
_DUMMY = "dummy"
ReportProgress = Callable[[int, int], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step, and the facts others need about it. Whoever built it closes `device` at the end."""

    core: EngineCore
    memory: KvMemory
    config: ModelConfig
    fingerprint: str
    num_blocks: int
    max_request_tokens: int
    device: Device


@dataclass(frozen=True, slots=True)
class _Model:
    """A loaded model on its device, and what it needs of a KV pool. `before`: the GPU's memory without it."""

    decoder: Decoder
    sampler: Sampler
    layout: KvLayout
    fingerprint: str
    before: MemoryReading | None


def build_engine(
    settings: EngineSettings,
    allocate: KvAllocator,
    progress: ReportProgress | None = None,
    graph_progress: ReportProgress | None = None,
) -> Engine:
    """Load the checkpoint and build an engine around it.

    `allocate` gives the memory of a KV pool in host memory; `progress(done, total)` counts bytes of weights,
    `graph_progress(done, total)` recorded graphs. Sets the number of torch threads of this process. Raises
    `ModelLoadError` and `InvalidSetting`.
    """
    device = open_device(settings.device)
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    with enough_memory():
        return _build(settings, device, allocate, progress, graph_progress)


def _build(
    settings: EngineSettings,
    device: Device,
    allocate: KvAllocator,
    progress: ReportProgress | None,
    graph_progress: ReportProgress | None,
) -> Engine:
    folder = find_checkpoint(settings.model, weights=settings.load_format != _DUMMY)
    config = load_config(folder)
    capacity = find_capacity(settings, config, is_gpu=device.torch_device.type == "cuda")
    model = _load(settings, folder, config, device, progress)
    limits = RunnerLimits(settings.max_num_seqs, capacity.num_step_tokens, capacity.blocks_per_request)
    choice = _choose_attention(settings, model, limits, device)
    num_blocks = chosen_num_blocks(settings, model.layout)
    if num_blocks is None:
        num_blocks = _num_blocks(settings, capacity, model, limits, choice, device)
    memory = _kv_memory(model.layout, num_blocks, allocate, device)
    runner = _runner(settings, model, limits, choice, memory, device, graph_progress)
    core = _core(settings, capacity, model, num_blocks, runner)
    return Engine(core, memory, config, model.fingerprint, num_blocks, core.max_request_tokens, device)


def _load(
    settings: EngineSettings, folder: Path, config: ModelConfig, device: Device, progress: ReportProgress | None
) -> _Model:
    dtype = choose_dtype(settings.dtype, config)
    is_gpu = device.torch_device.type == "cuda"
    before = read_memory(device.torch_device) if is_gpu else None
    decoder = Decoder(config, TORCH_DTYPES[dtype], device.torch_device)
    if settings.load_format == _DUMMY:
        fill_with_noise(decoder)
        fingerprint = dummy_fingerprint(config, device.torch_device.type)
    else:
        load_weights(folder, decoder, progress)
        fingerprint = model_fingerprint(folder, config)
    sampler = Sampler(frozenset(config.eos_token_ids), config.vocab_size)
    layout = KvLayout.of_layers(dtype, settings.block_size, decoder.layer_kvs)
    return _Model(decoder, sampler, layout, fingerprint, before)


def _choose_attention(settings: EngineSettings, model: _Model, limits: RunnerLimits, device: Device) -> AttentionChoice:
    shape = AttentionShape(
        num_heads=model.decoder.config.num_heads,
        dtype=model.decoder.dtype,
        layout=model.layout,
        max_blocks=limits.max_blocks_per_request,
        max_graph_sequences=0 if settings.enforce_eager else limits.max_decodes,
    )
    return choose_attention(settings.attention_backend, device, shape)


def _num_blocks(
    settings: EngineSettings,
    capacity: Capacity,
    model: _Model,
    limits: RunnerLimits,
    choice: AttentionChoice,
    device: Device,
) -> int:
    """The size of the pool where the settings leave it open. Raises `InvalidSetting`."""
    if model.before is None:
        return host_num_blocks(settings, model.layout, capacity)
    reset_peak(device.torch_device)
    profile(model.decoder, model.sampler, device, limits)
    after = read_memory(device.torch_device)
    reserved = choice.workspace_bytes
    if not settings.enforce_eager:
        logits_bytes = 4 * limits.max_decodes * model.decoder.config.vocab_size
        reserved += logits_bytes + len(graph_sizes(limits.max_decodes)) * _BYTES_PER_GRAPH
    budget = kv_budget(model.before, after, reserved, settings.gpu_memory_utilization)
    num_blocks = device_num_blocks(budget, settings, model.layout, capacity)
    needed = capacity.blocks_per_request * model.layout.block_bytes
    if num_blocks is None:
        raise too_small(budget, needed, after, settings.gpu_memory_utilization)
    _log.info("KV pool: %d blocks, %.2f GiB", num_blocks, num_blocks * model.layout.block_bytes / 2**30)
    if num_blocks < capacity.blocks_per_request:
        _log.warning("the KV pool limits requests to %d tokens", num_blocks * settings.block_size)
    return num_blocks


def _kv_memory(layout: KvLayout, num_blocks: int, allocate: KvAllocator, device: Device) -> KvMemory:
    if device.has_own_memory:
        return device_kv_memory(layout, num_blocks, device.torch_device)
    return host_kv_memory(layout, num_blocks, allocate)


def _runner(
    settings: EngineSettings,
    model: _Model,
    limits: RunnerLimits,
    choice: AttentionChoice,
    memory: KvMemory,
    device: Device,
    progress: ReportProgress | None,
) -> ModelRunner:
    attention = choice.build(memory.paged)
    with_spare = replace(limits, spare_block=memory.spare_block)
    runner = ModelRunner(model.decoder, attention, model.sampler, device, with_spare)
    if not settings.enforce_eager:
        runner.record_graphs(progress)
    runner.warm_up()
    return runner


def _core(
    settings: EngineSettings, capacity: Capacity, model: _Model, num_blocks: int, runner: ModelRunner
) -> EngineCore:
    config = model.decoder.config
    pool = BlockPool(num_blocks, prefix_caching=settings.enable_prefix_caching)
    limits = SchedulerLimits(
        settings.block_size,
        settings.max_num_seqs,
        capacity.num_step_tokens,
        min(capacity.max_model_len, num_blocks * settings.block_size),
        vocab_size=config.vocab_size,
    )
    scheduler = Scheduler(pool, limits, frozenset(config.eos_token_ids))
    return EngineCore(pool, scheduler, runner, model.fingerprint)
