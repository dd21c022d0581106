"""Blocks are read out of files, and never wrong ones."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from baton.engine.cache.disk.batch_file import DamagedFile
from baton.engine.cache.disk.folder import CacheFolder
from baton.engine.cache.disk.reader import BatchReader, Place
from baton.testing.kv_stores import BLOCK_BYTES, block_of, hash_of
from tests.engine.cache.disk.tiers_on_disk import GIB, KIND


def places(path: Path, *numbers: int) -> list[Place]:
    """Where the blocks of a new file are."""
    file, header = CacheFolder(path, GIB).write(KIND, [block_of(number) for number in numbers])
    return [
        Place(file.name, header.block_offset(place), checksum) for place, (_, checksum) in enumerate(header.entries)
    ]


def test_blocks_of_several_files_are_read_in_any_order(tmp_path: Path) -> None:
    where = dict(zip((1, 2, 3, 4), (*places(tmp_path, 1, 2), *places(tmp_path, 3, 4)), strict=True))
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader:
        for number in (2, 4, 1, 3, 3):
            block = reader.read(hash_of(number), where[number])
            assert block.content.tobytes() == block_of(number).content.tobytes()
            assert block.checksum == block_of(number).checksum


def test_reading_marks_a_file_as_used(tmp_path: Path) -> None:
    (place,) = places(tmp_path, 1)
    os.utime(tmp_path / place.file, (1, 1))
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader:
        reader.read(hash_of(1), place)
    found = (tmp_path / place.file).stat()
    assert (found.st_mode & 0o777, found.st_mtime > 1) == (0o400, True)


def test_what_was_read_of_a_file_is_dropped_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = *places(tmp_path, 1, 2), *places(tmp_path, 3)
    advice: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *said: advice.append(said))
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader:
        for number, place in ((1, first), (2, second), (3, other)):
            reader.read(hash_of(number), place)
    assert advice == [(0, 0, os.POSIX_FADV_DONTNEED)] * 2


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    (place,) = places(tmp_path, 1)
    content = bytearray((tmp_path / place.file).read_bytes())
    content[place.offset + at] ^= 16
    (tmp_path / place.file).write_bytes(content)
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader, pytest.raises(DamagedFile, match="wrong bytes"):
        reader.read(hash_of(1), place)


def test_a_block_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    first, second = places(tmp_path, 1, 2)
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader, pytest.raises(DamagedFile, match="wrong bytes"):
        reader.read(hash_of(1), first._replace(offset=second.offset))


def test_a_cut_file_is_found(tmp_path: Path) -> None:
    _, place = places(tmp_path, 1, 2)
    os.truncate(tmp_path / place.file, place.offset + 9)
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader, pytest.raises(DamagedFile, match="ends after"):
        reader.read(hash_of(2), place)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (place,) = places(tmp_path, 1)
    (tmp_path / place.file).rename(tmp_path / "elsewhere")
    (tmp_path / place.file).symlink_to(tmp_path / "elsewhere")
    with closing(BatchReader(tmp_path, BLOCK_BYTES)) as reader, pytest.raises(OSError, match="symbolic links"):
        reader.read(hash_of(1), place)
