"""The disk tier: a store like any, which outlives its node and every fault of a disk."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.disk import disk_tier
from baton.engine.cache.disk.folder import CacheFile, CacheFolder
from baton.engine.cache.disk.reader import BatchReader, Place
from baton.engine.cache.last_blocks import LastBlock
from baton.engine.cache.store import BlockKind, KvStore, StoredBlock
from baton.testing.kv_stores import BLOCK_BYTES, Collected, KvStoreSuite, block_of, hash_of
from tests.engine.cache.disk.tiers_on_disk import GIB, KIND, OTHER_KIND, Opened, files_in, until

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks fill a file, and no file is written before. Nothing rests for long."""
    monkeypatch.setattr(disk_tier, "_FILE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(disk_tier, "_MIN_FILES", 1)
    monkeypatch.setattr(disk_tier, "_STAGED_FILES", 64)
    monkeypatch.setattr(disk_tier, "_LINGER_S", 60.0)
    monkeypatch.setattr(disk_tier, "REST_S", 0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is written as well, and the folder is looked at all the time."""
    monkeypatch.setattr(disk_tier, "_LINGER_S", 0.01)


class TestDiskTier(KvStoreSuite):
    """As every store, with most blocks in memory still."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open(self) -> KvStore:
        return Opened(self.path)


class TestRestartedDiskTier(TestDiskTier):
    """As every store, with all blocks in files of a node that has ended."""

    @contextmanager
    def opened(self, *numbers: int) -> Iterator[KvStore]:
        with super().opened(*numbers):
            pass
        with closing(Opened(self.path)) as tier:
            until(lambda: tier.has_written(*numbers))
            yield tier


def loaded(tier: KvStore, *numbers: int) -> list[int]:
    """Those of the blocks that come, from the first on; each of them is right."""
    landing = Collected()
    tier.load([hash_of(number) for number in numbers], landing)
    found = landing.wait()
    for number, block in zip(numbers, found, strict=False):
        assert block.content.tobytes() == block_of(number).content.tobytes()
    return list(numbers[: len(found)])


def last(*numbers: int) -> list[LastBlock]:
    return [LastBlock(hash_of(number), partial(block_of, number)) for number in numbers]


def filled(path: Path, *numbers: int, kind: BlockKind = KIND) -> list[Path]:
    """The files of a node that has put these blocks and has ended."""
    with closing(Opened(path, kind)) as tier:
        for number in numbers:
            tier.put(block_of(number))
    return files_in(path)


def test_starting_waits_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    may_look, refresh = threading.Event(), CacheFolder.refresh

    def slow(folder: CacheFolder) -> tuple[list[CacheFile], list[CacheFile]]:
        assert may_look.wait(10.0)
        return refresh(folder)

    monkeypatch.setattr(CacheFolder, "refresh", slow)
    with closing(Opened(tmp_path)) as tier:
        assert tier.has(1) == []
        may_look.set()
        until(lambda: tier.has(1))
        assert loaded(tier, 1) == [1]


def test_what_is_loaded_is_not_what_is_staged_next(tmp_path: Path) -> None:
    """The memory of a block that was written is used again."""

    class Slow(Collected):
        """Looks at a block when others have taken its place."""

        def arrived(self, block: StoredBlock) -> bool:
            until(tier.has_written)
            for number in (3, 4):
                tier.put(block_of(number))
            return super().arrived(block)

    with closing(Opened(tmp_path)) as tier:
        tier.put(block_of(1))
        landing = Slow()
        tier.load([hash_of(1)], landing)
        tier.put(block_of(2))
        (found,) = landing.wait()
        assert found.content.tobytes() == block_of(1).content.tobytes()


@pytest.mark.usefixtures("impatient")
def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    with closing(Opened(tmp_path)) as first, closing(Opened(tmp_path)) as second:
        first.put(block_of(1))
        until(lambda: second.has(1))
        assert loaded(second, 1) == [1]
        for file in list(second.cache_folder.files.values()):
            os.unlink(tmp_path / file.name)
        until(lambda: not first.has(1))
        assert loaded(first, 1) == []
        assert (first.counters.num_failures, first.counters.num_damaged_blocks) == (0, 0)


def test_a_file_that_has_just_vanished_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = filled(tmp_path, 1, 2)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(1))
        monkeypatch.setattr(tier, "_look", lambda: None)
        file.unlink()
        assert tier.has(1, 2) == [1, 2]
        assert loaded(tier, 1, 2) == []
        assert tier.has(1, 2) == []
        assert (tier.counters.num_failures, tier.counters.num_damaged_blocks) == (0, 0)


def test_files_of_all_nodes_take_no_more_than_the_limit(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, kind=OTHER_KIND)
    max_bytes = 4 * (96 + 2 * BLOCK_BYTES)
    nodes = [Opened(tmp_path, max_bytes=max_bytes) for _ in range(2)]
    with closing(nodes[0]), closing(nodes[1]):
        for number in range(10, 30, 2):
            for tier in nodes:
                tier.put(block_of(number))
                tier.put(block_of(number + 1))
                until(tier.has_written)
                assert sum(file.stat().st_size for file in files_in(tmp_path)) <= max_bytes
        assert nodes[1].has(1, 2, 28, 29) == [28, 29]
        assert nodes[1].usage == 1.0


def test_a_folder_that_is_smaller_than_a_file_should_be_is_used_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_FILE_BYTES", 2**25)
    monkeypatch.setattr(disk_tier, "_MIN_FILES", 8)
    monkeypatch.setattr(disk_tier, "_STAGED_FILES", 2)
    tier = Opened(tmp_path, max_bytes=40 * BLOCK_BYTES)
    tier.keep_last(last(*range(40)), lambda: 10.0)
    tier.close()
    assert tier.has(*range(40)) == [*range(35)]  # seven files of five
    assert tier.counters.num_failures == 0


def test_a_folder_with_room_for_two_blocks_has_one_in_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_MIN_FILES", 8)
    with closing(Opened(tmp_path, max_bytes=2 * (72 + BLOCK_BYTES))) as tier:
        for number in (1, 2, 3):
            tier.put(block_of(number))
            until(tier.has_written)
        assert tier.has(1, 2, 3) == [2, 3]


def test_what_gives_way_is_handed_down(tmp_path: Path) -> None:
    below: list[StoredBlock] = []

    def keep(block: StoredBlock) -> None:
        below.append(block._replace(content=block.content.copy()))

    with closing(Opened(tmp_path, max_bytes=96 + 2 * BLOCK_BYTES, on_evicted=keep)) as tier:
        for first in (1, 3):
            tier.put(block_of(first))
            tier.put(block_of(first + 1))
            until(tier.has_written)
    assert [(each.block_hash, each.content.tobytes()) for each in below] == [
        (hash_of(number), block_of(number).content.tobytes()) for number in (1, 2)
    ]


# what goes wrong: counted, computed again, never served


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["header", "table", "cut", "empty", "grown", "another kind"])
def test_a_damaged_file_is_not_taken_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    _, bad = filled(tmp_path, 1, 2, 3, 4)
    if damage == "cut":
        os.truncate(bad, bad.stat().st_size - 1)
    elif damage == "empty":
        os.truncate(bad, 0)
    elif damage == "grown":
        os.truncate(bad, bad.stat().st_size + 1)
    elif damage == "another kind":
        (tmp_path / "other").mkdir()
        (other,) = filled(tmp_path / "other", 3, 4, kind=OTHER_KIND)
        shutil.move(other, bad)
    else:
        change(bad, 16 if damage == "header" else 60)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(1) and tier.counters.num_damaged_blocks)
        assert tier.has(1, 2, 3, 4) == [1, 2]
        assert tier.counters.num_damaged_blocks == 1
        assert str(bad) in caplog.text


def test_a_file_that_cannot_be_read_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(path: Path) -> int:
        raise OSError(errno.EIO, "broken")

    filled(tmp_path, 1)
    monkeypatch.setattr(disk_tier, "open_file", failing)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.counters.num_failures)
        assert (tier.has(1), tier.counters.num_damaged_blocks) == ([], 0)
    assert caplog.messages == ["the disk tier failed at reading: [Errno 5] broken"]


def test_a_file_that_cannot_be_read_any_more_is_not_looked_into_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(reader: BatchReader, block_hash: bytes, place: Place) -> StoredBlock:
        raise OSError(errno.EIO, "broken")

    (file,) = filled(tmp_path, 1, 2)
    monkeypatch.setattr(BatchReader, "read", failing)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has_written(1, 2))
        assert loaded(tier, 1, 2) == []
        assert tier.has(1, 2) == []
        assert (tier.counters.num_failures, tier.counters.num_damaged_blocks) == (1, 0)
        assert caplog.messages == ["the disk tier failed at reading: [Errno 5] broken"]
    assert file.exists()


def test_a_flipped_byte_costs_its_file_and_nothing_else(tmp_path: Path) -> None:
    good, bad = filled(tmp_path, 1, 2, 3, 4)
    change(bad, 96 + BLOCK_BYTES + 7)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has_written(1, 3))
        assert loaded(tier, 3, 4, 1) == [3]
        assert tier.counters.num_damaged_blocks == 1
        assert tier.has(1, 2, 3, 4) == [1, 2]
        assert loaded(tier, 1, 2) == [1, 2]
        assert files_in(tmp_path) == [good]


def test_a_file_that_is_cut_while_it_is_known_is_found(tmp_path: Path) -> None:
    (file,) = filled(tmp_path, 1, 2)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has_written(1, 2))
        os.truncate(file, 96 + BLOCK_BYTES + 1)
        assert loaded(tier, 1, 2) == [1]
        assert (tier.counters.num_damaged_blocks, tier.has(1, 2)) == (1, [])


def test_blocks_of_another_kind_are_not_seen(tmp_path: Path) -> None:
    filled(tmp_path, 1, kind=OTHER_KIND)
    filled(tmp_path, 2)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(2))
        assert tier.has(1, 2) == [2]
        assert tier.counters.num_damaged_blocks == 0


@pytest.mark.usefixtures("impatient")
def test_deleting_the_folder_is_safe_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    filled(path, 1, 2)
    with closing(Opened(path)) as tier:
        until(lambda: tier.has_written(1, 2))
        shutil.rmtree(path / KIND.digest.hex())
        assert loaded(tier, 1, 2) == []
        tier.put(block_of(3))
        until(lambda: tier.has_written(3))
        shutil.rmtree(path)
        assert loaded(tier, 3) == []
        tier.put(block_of(4))
        until(lambda: tier.counters.num_failures)
        assert not path.exists()
        path.mkdir()
        tier.put(block_of(5))
        until(lambda: tier.has_written(5))
        assert loaded(tier, 5) == [5]


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_drops_blocks_and_leaves_no_half_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    filled(tmp_path, 1, 2)
    before = files_in(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(Opened(tmp_path)) as tier:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES, limits[1]))
        try:
            tier.put(block_of(3))
            until(lambda: tier.counters.num_rests == 1)
            tier.put(block_of(4))
            until(lambda: tier.counters.num_rests == 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tier.counters.num_failures, tier.counters.num_dropped_blocks) == (2, 2)
        assert caplog.messages == ["the disk tier failed at keeping files: [Errno 27] File too large"]
        assert (tier.has(1, 2, 3), files_in(tmp_path)) == ([1, 2], before)
        tier.put(block_of(3))
        until(lambda: tier.has_written(3))
        assert caplog.messages[1:] == ["the disk tier works again"]


@pytest.mark.usefixtures("impatient")
def test_a_file_system_without_space_gets_no_file(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, min_free_bytes=2**62)) as tier:
        tier.put(block_of(1))
        until(lambda: tier.counters.num_dropped_blocks)
        assert files_in(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1, 2)
    opened = os.open

    def refused(*arguments: object, **options: object) -> int:
        raise OSError(30, "Read-only file system")

    def only_for_reading(path: Path, flags: int, mode: int = 0o777) -> int:
        return opened(path, flags, mode) if flags & os.O_ACCMODE == os.O_RDONLY else refused()

    for name in ("utime", "fchmod", "unlink", "mkdir", "rename"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr(os, "open", only_for_reading)
    with closing(Opened(tmp_path)) as tier:
        tier.put(block_of(3))
        until(lambda: tier.counters.num_dropped_blocks)
        assert loaded(tier, 1, 2) == [1, 2]


def test_a_disk_that_stalls_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_CLOSE_S", 0.1)
    filled(tmp_path, 1, 2)
    goes_on, read, write = threading.Event(), BatchReader.read, os.writev

    def stalled_read(reader: BatchReader, block_hash: bytes, place: Place) -> StoredBlock:
        assert goes_on.wait(10.0)
        return read(reader, block_hash, place)

    def stalled_write(descriptor: int, pieces: list[memoryview]) -> int:
        assert goes_on.wait(10.0)
        return write(descriptor, pieces)

    monkeypatch.setattr(BatchReader, "read", stalled_read)
    monkeypatch.setattr(os, "writev", stalled_write)
    landings = [Collected() for _ in range(300)]
    tier = Opened(tmp_path)
    until(lambda: tier.has(1))
    for number in range(1000, 1200):
        tier.put(block_of(number))
    for landing in landings:
        tier.load([hash_of(1), hash_of(2)], landing)
    assert tier.counters.num_dropped_blocks == 200 - 128
    assert sum(landing.is_over for landing in landings) in range(300 - 256 - 2, 300 - 256 + 1)
    tier.close()
    goes_on.set()
    for landing in landings:
        landing.wait()
    until(lambda: not any(thread.is_alive() for thread in tier._threads))


def test_a_load_that_nobody_waits_for_is_not_read(tmp_path: Path) -> None:
    class Over(Collected):
        is_over = True

    filled(tmp_path, 1)
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(1))
        landing = Over()
        tier.load([hash_of(1)], landing)
        assert landing.wait() == []


def test_what_is_being_loaded_at_the_end_ends_behind_its_block(tmp_path: Path) -> None:
    class Closing(Collected):
        """Closes the tier before it has taken its first block."""

        def arrived(self, block: StoredBlock) -> bool:
            if not self.blocks:
                closing.start()
                until(lambda: tier._is_closed)
            return super().arrived(block)

    tier = Opened(tmp_path)
    closing, landing = threading.Thread(target=tier.close), Closing()
    tier.put(block_of(1))
    tier.put(block_of(2))
    tier.load([hash_of(1), hash_of(2)], landing)
    assert [each.block_hash for each in landing.wait()] == [hash_of(1)]
    closing.join(10.0)
    assert not closing.is_alive()


DYING = """
import fcntl, os, signal, sys
from pathlib import Path
from baton.engine.cache.disk import folder
from baton.testing.kv_stores import block_of
from tests.engine.cache.disk.tiers_on_disk import GIB, KIND

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def half(descriptor, header, blocks):
    os.write(descriptor, header.packed() + blocks[0].content.tobytes()[:99])
    die()

rename = os.rename

def rename_and_die(*arguments):
    rename(*arguments)
    die()

phases = [(fcntl, "flock", die), (folder, "write_batch", half), (os, "rename", die), (os, "rename", rename_and_die)]
for number, (module, name, deadly) in enumerate(phases):
    if not (child := os.fork()):
        setattr(module, name, deadly)
        folder.CacheFolder(Path(sys.argv[1]), GIB, 0).write(KIND, [block_of(number)])
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


@pytest.mark.usefixtures("impatient")
def test_a_node_that_is_killed_leaves_whole_files_or_none(tmp_path: Path) -> None:
    """Before the file is locked, in the middle of it, before it has its name, and after."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=True, timeout=60, cwd=ROOT, env=environment)
    assert len(files_in(tmp_path)) == 4
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(3))
        assert tier.has(0, 1, 2, 3) == [3]
        assert loaded(tier, 3) == [3]
        assert len(files_in(tmp_path)) == 1
        assert tier.counters.num_damaged_blocks == 0
        tier.put(block_of(0))
        until(lambda: tier.has_written(0))


def test_what_is_forgotten_while_it_is_written_stays_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, goes_on, write = threading.Event(), threading.Event(), os.writev

    def slow(descriptor: int, pieces: list[memoryview]) -> int:
        is_writing.set()
        assert goes_on.wait(10.0)
        return write(descriptor, pieces)

    monkeypatch.setattr(os, "writev", slow)
    with closing(Opened(tmp_path, max_bytes=GIB)) as tier:
        tier.put(block_of(1))
        tier.put(block_of(2))
        assert is_writing.wait(10.0)
        tier.forget(hash_of(1))
        goes_on.set()
        until(lambda: tier.has_written(2))
        assert tier.has(1, 2) == [2]


class Told(BlockChanges):
    """What a tier has told so far."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: set[bytes] = set()

    def agrees(self, tier: Opened, *numbers: int) -> bool:
        for block_hash, has_come in self.take(1000):
            assert (block_hash in self.blocks) != has_come  # each comes and leaves in turns
            self.blocks ^= {block_hash}
        return self.blocks == {hash_of(number) for number in numbers if tier.lookup([hash_of(number)])}


@pytest.mark.usefixtures("impatient")
def test_it_tells_which_blocks_come_and_leave(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, max_bytes=5 * (BLOCK_BYTES + 100))) as tier, closing(Opened(tmp_path)) as other:
        tier.put(block_of(1))
        told = Told()
        tier.follow(told)
        assert told.agrees(tier, 1)
        other.put(block_of(20))
        until(lambda: tier.has(20) and told.agrees(tier, 1, 20))
        tier.forget(hash_of(20))
        tier.put(block_of(20))
        other.put(block_of(2))
        for number in (1, 2, 3, 4, 5, 6, 7, 8):  # more than there is room for
            tier.put(block_of(number))
            until(lambda: told.agrees(tier, *range(1, 21)))
        until(lambda: tier.has_written() and other.has_written())
        shutil.rmtree(files_in(tmp_path)[0].parent)
        until(lambda: not tier.has(*range(1, 21)) and told.agrees(tier, *range(1, 21)))
        assert told.blocks == set()


@pytest.mark.usefixtures("impatient")
def test_a_block_that_cannot_be_written_is_told_to_have_left(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, max_bytes=10)) as tier:
        told = Told()
        tier.follow(told)
        tier.put(block_of(1))
        until(lambda: tier.counters.num_dropped_blocks == 1 and not tier.has(1))
        assert told.agrees(tier, 1)
        assert told.blocks == set()


def test_before_the_end_more_blocks_are_written_than_can_be_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_STAGED_FILES", 2)
    tier = Opened(tmp_path)
    tier.put(block_of(3))
    tier.keep_last(last(*range(21)), lambda: 10.0)
    tier.close()
    assert (tier.counters.num_dropped_blocks, tier.has_written(*range(21))) == (0, True)
    with closing(Opened(tmp_path)) as again:
        until(lambda: again.has_written(*range(21)))
        assert loaded(again, *range(21)) == [*range(21)]


def forbidden() -> StoredBlock:
    raise AssertionError("there is no time to read it")


def test_a_disk_that_stalls_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_STAGED_FILES", 2)
    monkeypatch.setattr(disk_tier, "_CLOSE_S", 60.0)
    goes_on, write = threading.Event(), os.writev

    def stalled(descriptor: int, pieces: list[memoryview]) -> int:
        assert goes_on.wait(10.0)
        return write(descriptor, pieces)

    monkeypatch.setattr(os, "writev", stalled)
    tier, times_left = Opened(tmp_path), [0.01] * 8
    blocks = [*last(*range(4)), *([LastBlock(hash_of(4), forbidden)] * 16)]
    tier.keep_last(blocks, lambda: times_left.pop() if times_left else 0.0)  # as if somebody asked twice
    assert tier.counters.num_dropped_blocks == 16
    assert not times_left
    waits_s: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda _, timeout: waits_s.append(timeout))
        tier.close()
    assert waits_s == [0.0] * len(tier._threads)
    assert any(thread.is_alive() for thread in tier._threads)  # it was not waited for
    assert tier.counters.num_dropped_blocks == 20
    goes_on.set()
    until(lambda: not any(thread.is_alive() for thread in tier._threads))


def test_a_disk_that_fails_is_given_no_more_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, pieces: list[memoryview]) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_tier, "_STAGED_FILES", 2)
    monkeypatch.setattr(disk_tier, "REST_S", 60.0)
    monkeypatch.setattr(os, "writev", failing)
    tier = Opened(tmp_path)
    times_left = [1.0] * 200
    tier.keep_last(last(*range(100)), lambda: times_left.pop() if times_left else 0.0)
    assert times_left
    tier.close()
    assert tier.counters.num_dropped_blocks == 100


def test_what_is_written_before_the_end_displaces_neither_itself_nor_what_was_used(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    size = files_in(tmp_path)[0].stat().st_size
    with closing(Opened(tmp_path)) as tier:
        until(lambda: tier.has(1))
        assert loaded(tier, 1, 2) == [1, 2]
    filled(tmp_path, 3, 4)
    tier = Opened(tmp_path, max_bytes=4 * size)
    until(lambda: tier.has(1, 3) == [1, 3])
    tier.keep_last(last(*range(10, 20)), lambda: 10.0)
    tier.close()
    assert tier.has(1, 2, 3, 4, *range(10, 20)) == [1, 2, *range(10, 16)]
    assert tier.counters.num_dropped_blocks == 4
