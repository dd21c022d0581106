"""Which files give way, what is seen of other nodes, and what is left alone."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from baton.engine.cache.disk.folder import CacheFile, CacheFolder, mark_used, open_file
from baton.engine.cache.store import BlockKind
from baton.testing.kv_stores import BLOCK_BYTES, block_of
from tests.engine.cache.disk.tiers_on_disk import KIND, OTHER_KIND, files_in

FILE_BYTES = 48 + 24 + BLOCK_BYTES


def folder_of(path: Path, num_files: int = 100, min_free_bytes: int = 0) -> CacheFolder:
    return CacheFolder(path, num_files * FILE_BYTES, min_free_bytes)


def written(folder: CacheFolder, number: int, age: int = 0, kind: BlockKind = KIND) -> CacheFile:
    """A file of one block, that was written `age` seconds before the epoch's 1000th."""
    file, _ = folder.write(kind, [block_of(number)])
    os.utime(folder.path / file.name, (1000 - age, 1000 - age))
    file.note(os.lstat(folder.path / file.name))
    return file


def load_from(folder: CacheFolder, file: CacheFile, age: int = 0) -> None:
    descriptor = open_file(folder.path / file.name)
    mark_used(descriptor)
    os.close(descriptor)
    os.utime(folder.path / file.name, (1000 - age, 1000 - age))


def evicted(folder: CacheFolder, num_files: int) -> list[str]:
    """What gives way, in order, for so many files."""
    gone = []
    while file := folder.in_the_way(num_files * FILE_BYTES):
        folder.delete(file)
        gone.append(file.name)
    return gone


def test_what_another_node_writes_and_deletes_is_seen(tmp_path: Path) -> None:
    ours, theirs = folder_of(tmp_path), folder_of(tmp_path)
    assert ours.refresh() == ([], [])
    file = written(theirs, 1)
    new, gone = ours.refresh()
    assert ([each.name for each in new], gone) == ([file.name], [])
    assert ours.num_bytes == FILE_BYTES
    assert ours.refresh() == ([], [])
    theirs.delete(file)
    new, gone = ours.refresh()
    assert (new, [each.name for each in gone], ours.num_bytes) == ([], [file.name], 0)


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    file = written(folder_of(tmp_path), 1)
    assert (tmp_path / file.name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / file.folder).stat().st_mode & 0o777 == 0o700


def test_a_folder_into_which_others_may_write_is_not_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = written(folder, 1)
    (tmp_path / file.folder).chmod(0o777)
    assert folder_of(tmp_path).refresh() == ([], [])
    with pytest.raises(PermissionError):
        folder.write(KIND, [block_of(2)])


@pytest.mark.parametrize("name", ["notes.txt", "0" * 32, f"{'0' * 32}/notes", f"{'0' * 32}/0123456789abcdef-1.kv.old"])
def test_what_is_not_ours_is_neither_read_nor_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    folder = folder_of(tmp_path, 1)
    assert folder.refresh() == ([], [])
    written(folder, 1)
    evicted(folder, 1)
    assert (tmp_path / name).read_text() == "precious"


def test_what_has_the_name_of_a_file_and_is_none_is_left_alone(tmp_path: Path) -> None:
    file = written(folder_of(tmp_path), 1)
    os.mkfifo(tmp_path / file.folder / "0123456789abcdef-1.kv")
    new, _ = folder_of(tmp_path).refresh()
    assert [each.name for each in new] == [file.name]


def test_an_unfinished_file_goes_when_its_writer_has_gone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = written(folder, 1)
    left = tmp_path / file.folder / ".0123456789abcdef-1.kv"
    left.write_bytes(b"half")
    left.with_name(".0123456789abcdef-3.kv").touch()  # its writer was killed before it wrote
    with folder._unfinished(left.with_name(".0123456789abcdef-2.kv")) as descriptor:
        os.write(descriptor, b"half")
        folder_of(tmp_path).refresh()
        assert sorted(each.name for each in files_in(tmp_path)) == [".0123456789abcdef-2.kv", Path(file.name).name]


def test_a_file_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lock = folder_of(tmp_path), fcntl.flock
    written(folder, 1)

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        folder_of(tmp_path).refresh()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    written(folder, 2)
    assert fcntl.flock is lock
    assert len(folder_of(tmp_path).refresh()[0]) == 2
    assert len(files_in(tmp_path)) == 2


def test_the_oldest_files_give_way_as_soon_as_there_is_no_room(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 3)
    files = [written(folder, number, age=number) for number in range(3)]
    assert folder.usage == 1.0
    assert evicted(folder, 2) == [files[2].name, files[1].name]
    assert folder.in_the_way(2 * FILE_BYTES) is None
    assert [each.name for each in files_in(tmp_path)] == [Path(files[0].name).name]


def test_what_was_loaded_from_outlives_what_was_not(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 6)
    files = [written(folder, number, age=number) for number in range(6)]
    for place in (4, 5):
        load_from(folder, files[place], age=50 - place)
    gone = [files[place].name for place in (3, 2, 1)]
    assert evicted(folder, 3) == gone


def test_files_that_are_new_have_a_fifth_of_the_room(tmp_path: Path) -> None:
    """Else no file could ever be loaded from, once all others were."""
    folder = folder_of(tmp_path, 6)
    files = [written(folder, number, age=number) for number in range(6)]
    for file in files[1:]:
        load_from(folder, file, age=files.index(file))
    assert evicted(folder, 1) == [files[5].name]


def test_what_another_node_uses_is_known_before_a_file_gives_way(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 3)
    files = [written(folder, number, age=number) for number in range(3)]
    load_from(folder_of(tmp_path), files[2])
    assert evicted(folder, 1) == [files[1].name]


def test_use_and_order_outlive_the_node(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 3)
    files = [written(folder, number, age=number) for number in range(3)]
    load_from(folder, files[2], age=9)
    again = folder_of(tmp_path, 3)
    again.refresh()
    assert evicted(again, 1) == [files[1].name]


@pytest.mark.parametrize(("num_files", "num_new"), [(3, 0), (10, 7), (15, 12)])
def test_new_files_displace_neither_each_other_nor_what_was_loaded_from(
    tmp_path: Path, num_files: int, num_new: int
) -> None:
    folder = folder_of(tmp_path)
    for number in range(3):
        load_from(folder, written(folder, number))
    again = folder_of(tmp_path, num_files)
    again.refresh()
    assert again.num_new_files(FILE_BYTES) == num_new
    free = os.statvfs(tmp_path)
    assert folder_of(tmp_path, num_files, free.f_blocks * free.f_frsize).num_new_files(FILE_BYTES) == 0


def test_files_of_other_models_share_the_room(tmp_path: Path) -> None:
    other = folder_of(tmp_path)
    file = written(other, 1, age=9, kind=OTHER_KIND)
    folder = folder_of(tmp_path, 2)
    folder.refresh()
    written(folder, 2)
    assert folder.kinds() == sorted(each.digest.hex() for each in (KIND, OTHER_KIND))
    assert evicted(folder, 1) == [file.name]


def test_space_of_the_file_system_stays_free(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    folder = folder_of(tmp_path, 100, min_free_bytes=2 * found.f_bavail * found.f_frsize)
    written(folder, 1)
    with pytest.raises(OSError, match="No space left"):
        evicted(folder, 1)
    assert files_in(tmp_path) == []


def test_a_file_that_was_deleted_already_gives_way_as_well(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 2)
    written(folder, 1)
    written(folder, 2)
    shutil.rmtree(tmp_path / KIND.digest.hex())
    assert len(evicted(folder, 2)) == 2
    assert folder.num_bytes == 0


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, pieces: list[memoryview]) -> int:
        os.write(descriptor, pieces[0])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    folder = folder_of(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        folder.write(KIND, [block_of(1)])
    assert files_in(tmp_path) == []
    assert folder.num_bytes == 0
