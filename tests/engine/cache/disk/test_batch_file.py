"""A file of blocks is read back as it was written, or is refused with a reason."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.engine.cache.disk.batch_file import BatchHeader, DamagedFile, header_of, read_header, write_batch
from baton.engine.cache.store import BlockKind
from baton.testing.kv_stores import BLOCK_BYTES, block_of

KIND = BlockKind(BLOCK_BYTES, b"k" * 16)
BLOCKS = [block_of(number) for number in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three blocks."""
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    write_batch(descriptor, header_of(KIND, BLOCKS), BLOCKS)
    os.close(descriptor)
    return tmp_path / "file"


def header_in(path: Path) -> BatchHeader:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    header = header_in(path)
    assert header == header_of(KIND, BLOCKS)
    assert header.num_bytes == path.stat().st_size
    for number, block in enumerate(BLOCKS):
        offset = header.block_offset(number)
        assert path.read_bytes()[offset : offset + BLOCK_BYTES] == block.content.tobytes()


def test_a_write_that_the_system_cuts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, pieces: whole(descriptor, [pieces[0][:1000]]))
    with open(tmp_path / "file", "wb") as file:
        write_batch(file.fileno(), header_of(KIND, BLOCKS), BLOCKS)
    assert (tmp_path / "file").read_bytes()[-BLOCK_BYTES:] == BLOCKS[2].content.tobytes()
    assert header_in(tmp_path / "file") == header_of(KIND, BLOCKS)


def changed(place: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + value + content[place + len(value) :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "no header"),
        (lambda content: content[:20], "no header"),
        (lambda content: content[:60], "header is damaged"),
        (lambda content: content[:-1], "bytes, not"),
        (lambda content: content + b"x", "bytes, not"),
        (changed(0, b"X"), "no file of KV blocks"),
        (changed(8, struct.pack("<H", 2)), "it has version 2, not 1"),
        (changed(12, struct.pack("<I", 2**31)), "header is damaged"),
        (changed(12, struct.pack("<I", 2)), "header is damaged"),
        (changed(16, struct.pack("<Q", 2 * BLOCK_BYTES)), "header is damaged"),
        (changed(24, b"m"), "header is damaged"),
        (changed(40, b"\0"), "header is damaged"),
        (changed(50, b"\xff"), "header is damaged"),
    ],
)
def test_a_file_that_is_not_whole_and_ours_is_refused(
    path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedFile, match=reason):
        header_in(path)
