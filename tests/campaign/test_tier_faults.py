"""Faults of KV tiers: they are made, and undone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.cache.disk.folder import CacheFolder
from baton.engine.cache.store import BlockKind
from baton.testing.kv_stores import BLOCK_BYTES, block_of
from tests.campaign import tier_faults
from tests.campaign.kv_tiers import KvTiers
from tests.campaign.schedule import TIERS_TARGET, Fault
from tests.campaign.stalled_disk import obeyed
from tests.engine.cache.valkey_servers import until
from tests.system.harness import ROOT

KIND = BlockKind(BLOCK_BYTES, bytes(16))
READ_ONLY = """
import sys
from pathlib import Path
from tests.campaign import private_shm
if private_shm.mount():
    file = Path(sys.argv[1]) / "file"
    with private_shm.read_only(file.parent):
        try:
            file.touch()
        except OSError as error:
            print(error.strerror)
    file.touch()
"""


@pytest.fixture
def tiers(tmp_path: Path) -> KvTiers:
    """Three files of blocks."""
    tiers = KvTiers(tmp_path / "kv", has_server=False)
    folder = CacheFolder(tiers.folder, 2**20, 0)
    for number in range(3):
        folder.write(KIND, [block_of(number)])
    return tiers


@pytest.fixture
def served(tmp_path: Path) -> Iterator[KvTiers]:
    """A server with a few values."""
    tiers = KvTiers(tmp_path / "kv", has_server=True)
    assert tiers.server is not None
    for number in range(20):
        tiers.server.client.set(f"baton:kv:{number}", f"{number}" * 100)
    yield tiers
    asyncio.run(tiers.close())


def _fault(kind: str, lasts_s: float = 0.0, strength: float = 0.0, choice: float = 0.5) -> Fault:
    return Fault(0, 0.0, kind, TIERS_TARGET, lasts_s, "", strength, choice)


def _contents(tiers: KvTiers) -> list[bytes]:
    return [file.read_bytes() for file in tiers.files()]


def _made(tiers: KvTiers, fault: Fault) -> None:
    asyncio.run(tier_faults.make(fault, tiers))


@pytest.mark.parametrize("kind", ["kv-flip", "kv-cut", "kv-swap"])
def test_files_are_damaged_each_in_its_way(tiers: KvTiers, kind: str) -> None:
    before = _contents(tiers)
    _made(tiers, _fault(kind))
    after = _contents(tiers)
    assert after != before
    assert (sorted(after) == sorted(before)) == (kind == "kv-swap")
    assert (list(map(len, after)) == list(map(len, before))) == (kind != "kv-cut")
    for one, other in zip(before, after, strict=True):
        if kind == "kv-flip" and one != other:
            assert (int.from_bytes(one) ^ int.from_bytes(other)).bit_count() == 1


def test_some_files_are_removed(tiers: KvTiers) -> None:
    _made(tiers, _fault("kv-remove", strength=0.1))
    assert 0 <= len(tiers.files()) < 3


@pytest.mark.parametrize("strength", [0.5, 0.9])
def test_a_folder_is_gone_for_a_while(tiers: KvTiers, strength: float) -> None:
    async def run() -> bool:
        making = asyncio.ensure_future(tier_faults.make(_fault("kv-remove", 0.05, strength), tiers))
        await asyncio.sleep(0)
        was_there = tiers.folder.is_dir()  # the fault is there now
        await making
        return was_there

    assert not asyncio.run(run())
    assert tiers.folder.is_dir()
    assert not tiers.files()


def test_a_folder_is_read_only_for_a_while_where_mounts_are_allowed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", READ_ONLY, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said in ("", "Read-only file system\n")


def test_a_disk_tier_waits_for_its_files_while_its_disk_stalls(tiers: KvTiers) -> None:
    looked = threading.Event()

    def look() -> None:
        CacheFolder(tiers.folder, 2**20).refresh()
        looked.set()

    async def run() -> None:
        making = asyncio.ensure_future(tier_faults.make(_fault("kv-stall", 0.05), tiers))
        await asyncio.sleep(0)
        thread.start()
        assert not looked.is_set()
        await making

    thread = threading.Thread(target=look)
    begun_s = time.monotonic()
    with obeyed(["--kv-disk", str(tiers.folder)]):
        asyncio.run(run())
        assert looked.wait(60)
    assert time.monotonic() - begun_s >= 0.05
    thread.join()


def test_a_server_lies_about_some_values(served: KvTiers) -> None:
    assert served.server is not None
    _made(served, _fault("store-lie"))
    client = served.server.client
    names = [f"baton:kv:{number}" for number in range(20)]
    right = [client.type(name) == b"string" and client.get(name) == name[9:].encode() * 100 for name in names]
    assert not all(right)


def test_a_server_that_was_killed_runs_again_and_has_forgotten_everything(served: KvTiers) -> None:
    assert served.server is not None
    _made(served, _fault("store-kill", 0.01))
    assert served.server.is_running
    assert served.server.client.dbsize() == 0


def test_a_server_that_was_frozen_goes_on(served: KvTiers) -> None:
    assert served.server is not None
    _made(served, _fault("store-freeze", 0.01))
    until(lambda: served.server is not None and served.server.client.dbsize() == 20)
