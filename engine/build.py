"""Puts an engine together: checkpoint, KV pool, scheduler, runner.

Owns the sizing of the pool and the model fingerprint. Everything it makes is handed out; it keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.api.layout import KvLayout
from engine.attention.torch_backend import TorchAttention
from engine.cache.block_pool import BlockPool
from engine.capacity import chosen_num_blocks, find_capacity, host_num_blocks
from engine.core import EngineCore
from engine.device.host import HostDevice
from engine.models.checkpoint import choose_dtype
from engine.models.config import ModelConfig, load_config
from engine.models.decoder import TORCH_DTYPES, Decoder
from engine.models.identity import find_checkpoint, model_fingerprint
from engine.models.weights import load_weights
from engine.runner.kv_memory import KvAllocator, KvMemory, host_kv_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler, SchedulerLimits
from engine.settings import EngineSettings

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine ready to step, and the facts others need about it."""

    core: EngineCore
    memory: KvMemory
    config: ModelConfig
    fingerprint: str
    num_blocks: int
    max_request_tokens: int


def build_engine(settings: EngineSettings, allocate: KvAllocator, progress: Progress | None = None) -> Engine:
    """Load the checkpoint and build an engine around it.

    `allocate` gives the memory of the KV pool; `progress(done, total)` counts bytes of weights. Sets the number of
    torch threads of this process. Raises `ModelLoadError` and `InvalidSetting`.
    """
    torch.set_num_threads(settings.num_threads or len(os.sched_getaffinity(0)))
    folder = find_checkpoint(settings.model)
    config = load_config(folder)
    dtype = choose_dtype(settings.dtype, config)
    layout = KvLayout(dtype, config.num_layers, config.num_kv_heads, config.head_dim, settings.block_size)
    capacity = find_capacity(settings, config, is_gpu=False)
    num_blocks = chosen_num_blocks(settings, layout) or host_num_blocks(settings, layout, capacity)
    decoder = Decoder(config, TORCH_DTYPES[dtype], "cpu")
    load_weights(folder, decoder, progress)
    memory = host_kv_memory(layout, num_blocks, allocate)
    fingerprint = model_fingerprint(folder, config)
    eos_token_ids = frozenset(config.eos_token_ids)
    device = HostDevice()
    runner = ModelRunner(decoder, TorchAttention(memory.tensor, config.windows), Sampler(eos_token_ids), device)
    pool = BlockPool(num_blocks, prefix_caching=settings.enable_prefix_caching)
    max_request_tokens = min(capacity.max_model_len, num_blocks * settings.block_size)
    limits = SchedulerLimits(
        settings.block_size,
        settings.max_num_seqs,
        capacity.num_step_tokens,
        max_request_tokens,
        vocab_size=config.vocab_size,
    )
    core = EngineCore(pool, Scheduler(pool, limits, eos_token_ids), runner, fingerprint)
    return Engine(core, memory, config, fingerprint, num_blocks, max_request_tokens)
