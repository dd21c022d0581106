"""Opens the KV store of an engine: the tiers that the settings ask for, or what the caller brings.

Owns the names of Baton's own stores, the order of tiers, which blocks are of one kind, and what is refused: a size
without room, and a folder that cannot be used.

Ranks with pools of their own have tiers of their own, each for its part of a block. Sizes are the node's, so a rank's
host memory is as large a share of them as its part is of a block: all ranks have room for as many blocks.
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
from baton.engine.attention.choose import AttentionChoice
from baton.engine.cache.disk.disk_tier import DiskTier
from baton.engine.cache.disk.folder import CacheFolder
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import KIND_BYTES, BlockKind, KvStore, TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.engine.cache.valkey_server import server_at
from baton.engine.cache.valkey_store import ValkeyStore
from baton.engine.model_shard import Basis, ModelShard, fingerprint_of
from baton.engine.pool_size import DividedBlocks
from baton.engine.runner.kv_memory import ByteArray, KvMemory, populated
from baton.engine.runner.pool_bytes import pool_bytes
from baton.engine.settings import HOST, VALKEY, EngineSettings
from baton.runtime.plugins import KV_STORES, load
from baton.wire.errors import InvalidSetting

StoreOpener: TypeAlias = Callable[[BlockKind], KvStore]
"""Opens a store for the blocks of an engine."""
TiersOpener: TypeAlias = Callable[[BlockKind, float], Tiers]
"""Opens the tiers below a pool. The number: which share of the node's memory for them it may have."""
_NamedOpener: TypeAlias = Callable[[BlockKind, TierCounters, float], KvStore]
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
    if not settings.enable_prefix_caching:
        raise InvalidSetting(f"{flag} keeps what the prefix cache has forgotten: it needs --enable-prefix-caching")
    if settings.kv_disk:
        _require_folder(settings.kv_disk)
    if _has_host(settings):
        _require_memory(settings.kv_offloading_size * settings.num_ranks_here / settings.num_ranks)
    return partial(_open_tiers, settings, _named_store(settings))


def open_pool(
    basis: Basis, model: ModelShard, attention: AttentionChoice, memory: KvMemory, open_tiers: TiersOpener
) -> TieredPool:
    """The pool of a rank and the tiers below it. Raises `InvalidSetting`."""
    pool, settings, layout = pool_bytes(memory), basis.settings, memory.layout
    share = 1.0
    if memory.is_divided:
        whole = DividedBlocks(layout, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        share = pool.block_bytes / whole.block_bytes
    facts = fingerprint_of(basis, model), layout, pool.block_bytes, _computed_by(basis, model, attention), memory.shard
    kind = BlockKind(pool.block_bytes, blake2b(repr(facts).encode(), digest_size=KIND_BYTES).digest())
    return TieredPool(open_tiers(kind, share), pool)


def _computed_by(basis: Basis, model: ModelShard, attention: AttentionChoice) -> str:
    """What the rounding of KV depends on, beside the model: ranks add up in another order than one."""
    settings = basis.settings
    kernels = "torch" if basis.kernels is None else basis.kernels.level
    parts = basis.device.torch_device.type, kernels, attention.name, type(model.decoder).__name__, settings.dtype
    return " ".join([*parts, f"{settings.tensor_parallel_size}x{settings.pipeline_parallel_size}"])


def _named_store(settings: EngineSettings) -> _NamedOpener | None:
    """The shared store, or that of a package; None: the settings name none. Raises `InvalidSetting`."""
    if settings.kv_store == HOST:
        return None
    if settings.kv_store == VALKEY:
        server_of = server_at(settings.kv_store_url)
        return lambda kind, counters, _: ValkeyStore(server_of(kind), counters)
    found = load(KV_STORES, _STORE_FLAG, settings.kv_store, (HOST, VALKEY))
    max_bytes = settings.kv_offloading_size * _GIB
    return lambda kind, _, share: found.opened(KvStore, found.value, kind.block_bytes, int(max_bytes * share))


def only_tier(name: str, open_store: StoreOpener) -> TiersOpener:
    """Opens one store, and nothing else."""
    return lambda kind, _: Tiers([Tier(name, open_store(kind), TierCounters())])


def _open_tiers(settings: EngineSettings, open_named: _NamedOpener | None, kind: BlockKind, share: float) -> Tiers:
    """Host memory over a folder over a store with a name, as far as the settings ask for them."""
    memory = _host_memory(kind.block_bytes, settings.kv_offloading_size * share) if _has_host(settings) else None
    tiers: list[Tier] = []
    if open_named is not None:
        counters = TierCounters()
        tiers.insert(0, Tier(settings.kv_store, open_named(kind, counters, share), counters))
    if settings.kv_disk:
        tiers.insert(0, _disk_tier(settings, kind, tiers))
    if memory is not None:
        counters = TierCounters()
        host = HostTier(memory, Tiers(tuple(tiers)).put if tiers else None, counters)  # past those that rest
        tiers.insert(0, Tier(HOST, host, counters))
    return Tiers(tiers)


def _has_host(settings: EngineSettings) -> bool:
    return settings.kv_store in (HOST, VALKEY) and settings.kv_offloading_size > 0


def _host_memory(block_bytes: int, gib: float) -> ByteArray:
    num_slots = int(gib * _GIB) // block_bytes
    if not num_slots:
        raise InvalidSetting(f"{_FLAG} {gib:g} holds no block, of which one has {block_bytes} bytes")
    _require_memory(gib)
    _log.info("host tier: %d blocks, %.2f GiB", num_slots, num_slots * block_bytes / _GIB)
    return populated(num_slots * block_bytes).reshape(num_slots, block_bytes)


def _require_memory(gib: float) -> None:
    memory = read_host_memory()
    if gib * _GIB > memory.free:
        raise InvalidSetting(f"{_FLAG} {gib:g} needs as many GiB beside the KV pool, and {memory}")


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
