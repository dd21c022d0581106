"""Opens the KV store of an engine: the one that `--kv-store` names, or what the caller brings.

Owns the names of Baton's own stores, and what is refused: a size without room, and a pool whose blocks this process
does not have to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from baton.device.host_memory import read_host_memory
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import KvStore
from baton.engine.runner.kv_memory import KvMemory, populated
from baton.engine.runner.pool_bytes import pool_bytes
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.settings import HOST, EngineSettings
from baton.runtime.plugins import KV_STORES, load
from baton.wire.errors import InvalidSetting

StoreOpener: TypeAlias = Callable[[int, int], KvStore]
"""Opens a store for blocks of that many bytes, of which it may keep so many bytes in all; 0: as many as it likes.
Hashes of blocks name the model, its KV's type and the tenant as well."""
_FLAG, _STORE_FLAG = "--kv-offloading-size", "--kv-store"
_GIB = 2**30
_log = logging.getLogger(__name__)


def store_opener(settings: EngineSettings) -> StoreOpener | None:
    """What opens the store that the settings ask for; None: they want none. Raises `InvalidSetting` for what is known
    to have no store, before anything is loaded."""
    if not settings.has_kv_store:
        return None
    flag = _FLAG if settings.kv_store == HOST else _STORE_FLAG
    if settings.num_ranks > 1:
        raise InvalidSetting(f"{flag} is for nodes of one rank, and this one has {settings.num_ranks}")
    if not settings.enable_prefix_caching:
        raise InvalidSetting(f"{flag} keeps what the prefix cache has forgotten: it needs --enable-prefix-caching")
    if own := _OWN.get(settings.kv_store):
        return own
    found = load(KV_STORES, _STORE_FLAG, settings.kv_store, tuple(_OWN))
    return partial(found.opened, KvStore, found.value)


def open_offload(
    settings: EngineSettings, memory: KvMemory, open_store: StoreOpener, max_chunk: int, costs: StepCosts
) -> KvOffload:
    """What the evicted blocks of `memory`, that of an only rank, go to. `max_chunk`, `costs`: of its engine's steps.
    Raises `InvalidSetting`."""
    blocks, max_bytes = pool_bytes(memory), int(settings.kv_offloading_size * _GIB)
    store = open_store(blocks.block_bytes, max_bytes)
    return KvOffload(store, blocks, settings.block_size, max_chunk, lambda: costs.cost)


def _host_tier(block_bytes: int, num_bytes: int) -> HostTier:
    num_slots = num_bytes // block_bytes
    if not num_slots:
        raise InvalidSetting(f"{_FLAG} {num_bytes / _GIB:g} holds no block, of which one has {block_bytes} bytes")
    memory = read_host_memory()
    if num_bytes > memory.free:
        raise InvalidSetting(f"{_FLAG} {num_bytes / _GIB:g} needs as many GiB beside the KV pool, and {memory}")
    _log.info("host tier: %d blocks, %.2f GiB", num_slots, num_slots * block_bytes / _GIB)
    return HostTier(populated(num_slots * block_bytes).reshape(num_slots, block_bytes))


_OWN: dict[str, StoreOpener] = {HOST: _host_tier}
