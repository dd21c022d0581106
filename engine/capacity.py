"""How much an engine may hold: tokens of a step, tokens of a request, blocks of the pool.

Owns the rules behind "0: choose for me" of the settings. Knows sizes only: no tensors, and no device beyond its memory
budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.config import ModelConfig
from engine.settings import EngineSettings
from wire.errors import InvalidSetting
from wire.layout import KvLayout

_HOST_KV_BYTES = 2**30
_HOST_STEP_TOKENS = 512
_GPU_STEP_TOKENS = 2048
"""Long enough for full speed of the products, short enough that a prompt's first blocks travel while it computes."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is known before memory is measured. `blocks_per_request`: of the longest request."""

    max_model_len: int
    blocks_per_request: int
    num_step_tokens: int


def find_capacity(settings: EngineSettings, config: ModelConfig, *, is_gpu: bool) -> Capacity:
    """Check the settings against the model. Raises `InvalidSetting`."""
    for name in ("block_size", "max_num_seqs"):
        if getattr(settings, name) < 1:
            raise InvalidSetting(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    for name in ("max_model_len", "max_num_batched_tokens"):
        if getattr(settings, name) < 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} must not be negative, got {getattr(settings, name)}")
    limit = config.max_context_len
    if settings.max_model_len > limit:
        raise InvalidSetting(f"--max-model-len {settings.max_model_len} is above the model's limit of {limit} tokens")
    max_model_len = settings.max_model_len or limit
    num_step_tokens = settings.max_num_batched_tokens or (_GPU_STEP_TOKENS if is_gpu else _HOST_STEP_TOKENS)
    return Capacity(max_model_len, -(-max_model_len // settings.block_size), num_step_tokens)


def chosen_num_blocks(settings: EngineSettings, layout: KvLayout) -> int | None:
    """The size of the pool where the settings say it, None where it is to be chosen. Raises `InvalidSetting`."""
    if settings.num_blocks:
        if settings.num_blocks < 2:
            raise InvalidSetting(f"--num-blocks must be at least 2, got {settings.num_blocks}")
        return settings.num_blocks
    if settings.kv_cache_memory_bytes:
        num_blocks = settings.kv_cache_memory_bytes // layout.block_bytes
        if num_blocks < 2:
            raise InvalidSetting(
                f"--kv-cache-memory-bytes {settings.kv_cache_memory_bytes} holds {num_blocks} blocks of "
                f"{layout.block_bytes} bytes: at least 2 are needed"
            )
        return num_blocks
    return None


def host_num_blocks(settings: EngineSettings, layout: KvLayout, capacity: Capacity) -> int:
    """The pool of a node in host memory when nobody said: what all requests can use, within 1 GiB; one request at
    least."""
    usable = capacity.blocks_per_request * settings.max_num_seqs
    chosen = min(usable, max(_HOST_KV_BYTES // layout.block_bytes, capacity.blocks_per_request))
    return max(2, chosen)


def device_num_blocks(budget: int, settings: EngineSettings, layout: KvLayout, capacity: Capacity) -> int | None:
    """The pool of a GPU with `budget` bytes for it, beside the spare block; None when that is too little.

    A `--max-model-len` that was asked for has to fit. The model's own limit does not: requests are shorter then.
    """
    num_blocks = budget // layout.block_bytes - 1
    needed = capacity.blocks_per_request if settings.max_model_len else 2
    return num_blocks if num_blocks >= max(2, needed) else None
