"""Settings of an engine: which model, how much memory, how large a step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api.settings import setting


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What shapes an engine. Zero means "choose for me" where the documentation of a field says so."""

    model: str = setting("", "checkpoint folder or hub id; empty: the built-in demo model", positional=True)
    dtype: str = setting("auto", "type of weights and KV", choices=("auto", "bfloat16", "float16", "float32"))
    block_size: int = setting(16, "tokens per KV block")
    max_model_len: int = setting(0, "longest prompt plus output in tokens; 0: the model's own limit")
    kv_cache_memory_bytes: int = setting(0, "bytes of the KV pool; 0: what max-num-seqs can use, at most 1 GiB")
    num_blocks: int = setting(0, "blocks of the KV pool; overrides kv-cache-memory-bytes when above 0")
    max_num_seqs: int = setting(64, "requests computed together in a step")
    max_num_batched_tokens: int = setting(512, "token budget of a step: the largest chunk of a prompt")
    enable_prefix_caching: bool = setting(True, "reuse the KV of prompt beginnings seen before")
    num_threads: int = setting(0, "compute threads; 0: one per core this process may use")
