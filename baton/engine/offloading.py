"""Opens the KV store of an engine: the tiers that the settings ask for, or what the caller brings.

Owns the names of Baton's own stores, the order of tiers, and what is refused: a size without room, a folder that cannot
be used, and a pool whose blocks this process does not have to itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeAlias

from baton.device.host_memory import read_host_memory
from baton.engine.cache.disk.disk_tier import DiskTier
from baton.engine.cache.disk.folder import CacheFolder
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import KIND_BYTES, BlockKind, KvStore, TierCounters
from baton.engine.cache.tiers import Tier, Tiers
from baton.engine.cache.valkey_server import server_at
from baton.engine.cache.valkey_store import ValkeyStore
from baton.engine.runner.kv_memory import ByteArray, KvMemory, populated
from baton.engine.runner.pool_bytes import pool_bytes
from baton.engine.scheduler.step_costs import StepCosts
from baton.engine.settings import HOST, VALKEY, EngineSettings
from baton.runtime.plugins import KV_STORES, load
from baton.wire.errors import InvalidSetting
from baton.wire.layout import KvLayout

StoreOpener: TypeAlias = Callable[[BlockKind], KvStore]
"""Opens a store for the blocks of an engine."""
TiersOpener: TypeAlias = Callable[[BlockKind], Tiers]
_NamedOpener: TypeAlias = Callable[[BlockKind, TierCounters], KvStore]
_FLAG, _DISK_FLAG, _STORE_FLAG = "--kv-offloading-size", "--kv-disk", "--kv-store"
_DISK = "disk"
_DISK_GIB = 16.0
_GIB = 2**30
_log = logging.getLogger(__name__)


def tiers_opener(settings: EngineSettings) -> TiersOpener | None:
    """What opens the stores that the settings ask for; None: they want none. Raises `InvalidSetting` for what is known
    to have none, before anything is loaded."""
    if settings.kv_disk_size and not settings.kv_disk:
        raise InvalidSetting(f"--kv-disk-size {settings.kv_disk_size:g} needs a folder: {_DISK_FLAG} PATH")
    if bool(settings.kv_store_url) != (settings.kv_store == VALKEY):
        raise InvalidSetting(f"{_STORE_FLAG} {VALKEY} and --kv-store-url redis://HOST:6379/0 need each other")
    if not settings.has_kv_store:
        return None
    flag = _STORE_FLAG if settings.kv_store != HOST else _DISK_FLAG if settings.kv_disk else _FLAG
    if settings.num_ranks > 1:
        raise InvalidSetting(f"{flag} is for nodes of one rank, and this one has {settings.num_ranks}")
    if not settings.enable_prefix_caching:
        raise InvalidSetting(f"{flag} keeps what the prefix cache has forgotten: it needs --enable-prefix-caching")
    if settings.kv_disk:
        _require_folder(settings.kv_disk)
    return partial(_open_tiers, settings, _named_store(settings))


def kind_of(fingerprint: str, layout: KvLayout, computed_by: str) -> BlockKind:
    """What blocks of this model have in common. `computed_by`: names what else their bytes depend on, as other kernels
    round otherwise."""
    facts = repr((fingerprint, layout, layout.block_bytes, computed_by)).encode()
    return BlockKind(layout.block_bytes, blake2b(facts, digest_size=KIND_BYTES).digest())


def open_offload(
    settings: EngineSettings,
    memory: KvMemory,
    kind: BlockKind,
    open_tiers: TiersOpener,
    max_chunk: int,
    costs: StepCosts,
) -> KvOffload:
    """What the evicted blocks of `memory`, that of an only rank, go to. `max_chunk`, `costs`: of its engine's steps.
    Raises `InvalidSetting`."""
    return KvOffload(open_tiers(kind), pool_bytes(memory), settings.block_size, max_chunk, lambda: costs.cost)


def _named_store(settings: EngineSettings) -> _NamedOpener | None:
    """The shared store, or that of a package; None: the settings name none. Raises `InvalidSetting`."""
    if settings.kv_store == HOST:
        return None
    if settings.kv_store == VALKEY:
        server_of = server_at(settings.kv_store_url)
        return lambda kind, counters: ValkeyStore(server_of(kind), counters)
    found = load(KV_STORES, _STORE_FLAG, settings.kv_store, (HOST, VALKEY))
    max_bytes = int(settings.kv_offloading_size * _GIB)
    return lambda kind, _: found.opened(KvStore, found.value, kind.block_bytes, max_bytes)


def only_tier(name: str, open_store: StoreOpener) -> TiersOpener:
    """Opens one store, and nothing else."""
    return lambda kind: Tiers([Tier(name, open_store(kind), TierCounters())])


def _open_tiers(settings: EngineSettings, open_named: _NamedOpener | None, kind: BlockKind) -> Tiers:
    """Host memory over a folder over a store with a name, as far as the settings ask for them."""
    has_host = settings.kv_store in (HOST, VALKEY) and settings.kv_offloading_size > 0
    memory = _host_memory(kind.block_bytes, settings.kv_offloading_size) if has_host else None
    tiers: list[Tier] = []
    if open_named is not None:
        counters = TierCounters()
        tiers.insert(0, Tier(settings.kv_store, open_named(kind, counters), counters))
    if settings.kv_disk:
        tiers.insert(0, _disk_tier(settings, kind, tiers))
    if memory is not None:
        counters = TierCounters()
        host = HostTier(memory, Tiers(tuple(tiers)).put if tiers else None, counters)  # past those that rest
        tiers.insert(0, Tier(HOST, host, counters))
    return Tiers(tiers)


def _host_memory(block_bytes: int, gib: float) -> ByteArray:
    num_slots = int(gib * _GIB) // block_bytes
    if not num_slots:
        raise InvalidSetting(f"{_FLAG} {gib:g} holds no block, of which one has {block_bytes} bytes")
    memory = read_host_memory()
    if gib * _GIB > memory.free:
        raise InvalidSetting(f"{_FLAG} {gib:g} needs as many GiB beside the KV pool, and {memory}")
    _log.info("host tier: %d blocks, %.2f GiB", num_slots, num_slots * block_bytes / _GIB)
    return populated(num_slots * block_bytes).reshape(num_slots, block_bytes)


def _disk_tier(settings: EngineSettings, kind: BlockKind, below: Sequence[Tier]) -> Tier:
    max_bytes = int((settings.kv_disk_size or _DISK_GIB) * _GIB)
    counters = TierCounters()
    _log.info("disk tier: %s, at most %.2f GiB", settings.kv_disk, max_bytes / _GIB)
    folder = CacheFolder(Path(settings.kv_disk), max_bytes)
    return Tier(_DISK, DiskTier(folder, kind, counters, below[0].put if below else None), counters)


def _require_folder(path: str) -> None:
    """Raise `InvalidSetting` unless files can be made in a folder."""
    try:
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InvalidSetting(f"{_DISK_FLAG} {path} is no folder for files: {error.strerror}") from None
