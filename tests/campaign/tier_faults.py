"""Faults of the tiers that all nodes of a campaign share: the files of a folder, the folder, its disk, and the server.

Knows how to hurt them and nothing of what should happen then. Whatever ends a fault, the folder is there again, the
disk goes on and the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from valkey import Valkey
from valkey.exceptions import ValkeyError

from tests.campaign import private_shm
from tests.campaign.kv_tiers import KvTiers
from tests.campaign.schedule import Fault
from tests.campaign.settings import STORE_KINDS
from tests.campaign.stalled_disk import stalls_of
from tests.engine.cache.valkey_servers import RunningServer

_MAX_HIT = 8
_HEAD_BYTES = 256
_ANSWER_S = 1.0


async def make(fault: Fault, tiers: KvTiers) -> None:
    """Make it, and undo it after `lasts_s`."""
    rng = random.Random(fault.choice)
    if fault.kind in STORE_KINDS:
        if tiers.server is not None:
            await _hit_server(fault, tiers.server, rng)
        return
    match fault.kind:
        case "kv-flip" | "kv-cut" | "kv-swap":
            _damage(fault.kind, tiers.files(), rng)
        case "kv-remove" if fault.strength < 0.4:
            for file in _drawn(tiers.files(), rng):
                file.unlink(missing_ok=True)
        case "kv-remove":
            with _removed(tiers.folder, is_replaced=fault.strength > 0.7):
                await asyncio.sleep(fault.lasts_s)
        case "kv-read-only":
            with contextlib.suppress(OSError), private_shm.read_only(tiers.folder):  # the folder may be gone
                await asyncio.sleep(fault.lasts_s)
        case _:
            with _stall(stalls_of(tiers.folder) / f"{fault.number}"):
                await asyncio.sleep(fault.lasts_s)


def _damage(kind: str, files: list[Path], rng: random.Random) -> None:
    for file in _drawn(files, rng):
        with contextlib.suppress(OSError):  # a node has deleted it meanwhile
            size = file.stat().st_size
            if kind == "kv-cut":
                os.truncate(file, rng.randrange(size))
            elif kind == "kv-swap":
                _swap(file, files[files.index(file) - 1])
            else:
                _flip(file, rng.randrange(rng.choice((min(size, _HEAD_BYTES), size))), 1 << rng.randrange(8))


def _drawn(files: list[Path], rng: random.Random) -> list[Path]:
    return rng.sample(files, min(len(files), rng.randint(1, _MAX_HIT)))


def _flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as opened:
        byte = os.pread(opened.fileno(), 1, place)
        os.pwrite(opened.fileno(), bytes([byte[0] ^ bit]), place)


def _swap(file: Path, other: Path) -> None:
    if other == file:
        return
    aside = file.with_name("swapped")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


@contextlib.contextmanager
def _removed(folder: Path, *, is_replaced: bool) -> Iterator[None]:
    """The folder is gone, or there is a file in its place. Where a node writes into it meanwhile, it is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        if is_replaced:
            folder.touch(exist_ok=False)
    try:
        yield
    finally:
        if folder.is_file():
            folder.unlink()
        folder.mkdir(exist_ok=True)


@contextlib.contextmanager
def _stall(mark: Path) -> Iterator[None]:
    mark.touch()
    try:
        yield
    finally:
        mark.unlink()


async def _hit_server(fault: Fault, server: RunningServer, rng: random.Random) -> None:
    """It lies; or is killed, and started again without any block; or stands still."""
    if fault.kind == "store-lie":
        await asyncio.to_thread(_lie, server.port, rng)
        return
    if not server.is_running:
        return
    if fault.kind == "store-kill":
        server.kill()
    else:
        server.freeze()
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        if fault.kind == "store-kill":
            server.start()
        else:
            server.thaw()


def _lie(port: int, rng: random.Random) -> None:
    """About some blocks: the value has a turned bit, is cut, is that of another block, or no string at all."""
    client = Valkey(port=port, socket_timeout=_ANSWER_S)
    with contextlib.suppress(ValkeyError, OSError), contextlib.closing(client):
        keys = client.keys("baton:*")
        for key in rng.sample(keys, min(len(keys), 4 * _MAX_HIT)):
            _replace(client, key, rng.choice(keys), rng)


def _replace(client: Valkey, key: bytes, other: bytes, rng: random.Random) -> None:
    value = client.get(key)
    if not isinstance(value, bytes):  # the server has forgotten it meanwhile
        return
    place = rng.randrange(len(value))
    match rng.choice(("flip", "flip", "flip", "cut", "swap", "type")):
        case "flip":
            client.setrange(key, place, bytes([value[place] ^ 1 << rng.randrange(8)]))
        case "cut":
            client.set(key, value[:place])
        case "swap":
            client.copy(other, key, replace=True)
        case _:
            client.delete(key)
            client.rpush(key, value)
