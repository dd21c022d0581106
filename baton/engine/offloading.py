"""Opens the KV store of an engine: the host tier where `--kv-offloading-size` asks for one, or what the caller brings.

Owns what is refused: a size without room, and a pool whose blocks this process does not have to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from baton.device.host_memory import read_host_memory
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import KvStore
from baton.engine.runner.kv_memory import KvMemory, populated
from baton.engine.runner.pool_bytes import pool_bytes
from baton.engine.settings import EngineSettings
from baton.wire.errors import InvalidSetting

StoreOpener: TypeAlias = Callable[[int], KvStore]
"""Opens a store for blocks of that many bytes. Their hashes name the model, its KV's type and the tenant as well."""
_FLAG = "--kv-offloading-size"
_GIB = 2**30
_log = logging.getLogger(__name__)


def require_offloadable(settings: EngineSettings) -> None:
    """Raise `InvalidSetting` for what is known to have no store, before anything is loaded."""
    if not settings.kv_offloading_size:
        return
    if settings.num_ranks > 1:
        raise InvalidSetting(f"{_FLAG} is for nodes of one rank, and this one has {settings.num_ranks}")
    if not settings.enable_prefix_caching:
        raise InvalidSetting(f"{_FLAG} keeps what the prefix cache has forgotten: it needs --enable-prefix-caching")


def open_offload(settings: EngineSettings, memory: KvMemory, open_store: StoreOpener | None) -> KvOffload | None:
    """What the evicted blocks of `memory`, that of an only rank, go to; None: nothing. Raises `InvalidSetting`."""
    num_bytes = int(settings.kv_offloading_size * _GIB)
    if open_store is None and not settings.kv_offloading_size:
        return None
    blocks = pool_bytes(memory)
    store = _host_tier(num_bytes, blocks.block_bytes) if open_store is None else open_store(blocks.block_bytes)
    return KvOffload(store, blocks, settings.block_size)


def _host_tier(num_bytes: int, block_bytes: int) -> HostTier:
    num_slots = num_bytes // block_bytes
    if not num_slots:
        raise InvalidSetting(f"{_FLAG} {num_bytes / _GIB:g} holds no block, of which one has {block_bytes} bytes")
    memory = read_host_memory()
    if num_bytes > memory.free:
        raise InvalidSetting(f"{_FLAG} {num_bytes / _GIB:g} needs as many GiB beside the KV pool, and {memory}")
    _log.info("host tier: %d blocks, %.2f GiB", num_slots, num_slots * block_bytes / _GIB)
    return HostTier(populated(num_slots * block_bytes).reshape(num_slots, block_bytes))
