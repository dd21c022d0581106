"""Puts an engine together: checkpoint, KV pool, scheduler, runner.

Owns the sizing of the pool and the model fingerprint. Everything it makes is handed out; it keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.api.errors import InvalidSetting
from engine.api.layout import KvLayout
from engine.attention.torch_backend import TorchAttention
from engine.cache.block_pool import BlockPool
from engine.core import EngineCore
from engine.device.host import HostDevice
from engine.models.checkpoint import choose_dtype
from engine.models.config import ModelConfig, load_config
from engine.models.decoder import TORCH_DTYPES, Decoder
from engine.models.identity import find_checkpoint, model_fingerprint
from engine.models.weights import load_weights
from engine.runner.kv_memory import KvAllocator, KvMemory
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import Sampler
from engine.scheduler.scheduler import Scheduler, SchedulerLimits
from engine.settings import EngineSettings

_AUTO_KV_BYTES = 2**30
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
    max_model_len = _max_model_len(settings, config)
    num_blocks = _num_blocks(settings, layout, max_model_len)
    decoder = Decoder(config, TORCH_DTYPES[dtype], "cpu")
    load_weights(folder, decoder, progress)
    memory = KvMemory(layout, num_blocks, allocate)
    fingerprint = model_fingerprint(folder, config)
    eos_token_ids = frozenset(config.eos_token_ids)
    device = HostDevice()
    runner = ModelRunner(decoder, TorchAttention(memory.tensor, config.windows), Sampler(eos_token_ids), device)
    pool = BlockPool(num_blocks, prefix_caching=settings.enable_prefix_caching)
    max_request_tokens = min(max_model_len, num_blocks * settings.block_size)
    limits = SchedulerLimits(
        settings.block_size,
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        max_request_tokens,
        vocab_size=config.vocab_size,
    )
    core = EngineCore(pool, Scheduler(pool, limits, eos_token_ids), runner, fingerprint)
    return Engine(core, memory, config, fingerprint, num_blocks, max_request_tokens)


def _max_model_len(settings: EngineSettings, config: ModelConfig) -> int:
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(settings, name) < 1:
            raise InvalidSetting(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    if settings.max_model_len < 0:
        raise InvalidSetting(f"--max-model-len must not be negative, got {settings.max_model_len}")
    limit = config.max_context_len
    if settings.max_model_len > limit:
        raise InvalidSetting(f"--max-model-len {settings.max_model_len} is above the model's limit of {limit} tokens")
    return settings.max_model_len or limit


def _num_blocks(settings: EngineSettings, layout: KvLayout, max_model_len: int) -> int:
    if settings.num_blocks:
        if settings.num_blocks < 2:
            raise InvalidSetting(f"--num-blocks must be at least 2, got {settings.num_blocks}")
        return settings.num_blocks
    blocks_per_request = -(-max_model_len // settings.block_size)
    if settings.kv_cache_memory_bytes:
        num_blocks = settings.kv_cache_memory_bytes // layout.block_bytes
    else:
        usable = blocks_per_request * settings.max_num_seqs
        num_blocks = min(usable, max(_AUTO_KV_BYTES // layout.block_bytes, blocks_per_request))
    if num_blocks < 2:
        raise InvalidSetting(
            f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds {num_blocks} blocks of "
            f"{layout.block_bytes} bytes: at least 2 are needed"
        )
    return num_blocks
