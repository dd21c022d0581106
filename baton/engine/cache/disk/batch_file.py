"""One file of the disk tier: blocks that were evicted together, whole and checkable.

Owns the format, and what is said of a file that does not have it. Knows no folder, no index and no thread.

    head    magic 8 | u16 version | u16 0 | u32 blocks | u64 bytes of a block | kind 16 | u64 xxh3 of head and table
    table   for each block: hash 16 | u64 checksum (`baton.engine.cache.store.checksum_of`)
    content the blocks, one after another, up to the end of the file

All numbers are little endian. Invariant: a header is believed only if its checksum, its kind and the file's length are
right. Blocks have checksums of their own: whoever reads one compares.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from baton.engine.cache.store import KIND_BYTES, BlockKind, StoredBlock

VERSION = 1
MAX_BLOCKS = 4096
_MAGIC = b"BATONKV\n"
_HEAD = struct.Struct(f"<8sHxxIQ{KIND_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_ENTRY = struct.Struct("<16sQ")
_TABLE_OFFSET = _HEAD.size + _CHECKSUM.size
_MAX_PIECES = 512
"""Buffers of one system call, of which 1024 are allowed."""


class DamagedFile(Exception):
    """A file that is not what this node, or one like it, has written whole."""


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What is in a file: blocks of `kind`, in the order of `entries`, each a hash and a checksum."""

    kind: BlockKind
    entries: Sequence[tuple[bytes, int]]

    @property
    def content_offset(self) -> int:
        """Where the first block begins."""
        return _TABLE_OFFSET + _ENTRY.size * len(self.entries)

    @property
    def num_bytes(self) -> int:
        """The length of the file."""
        return self.block_offset(len(self.entries))

    def block_offset(self, number: int) -> int:
        """Where a block begins."""
        return self.content_offset + number * self.kind.block_bytes

    def packed(self) -> bytes:
        """All that stands before the blocks."""
        head = _HEAD.pack(_MAGIC, VERSION, len(self.entries), self.kind.block_bytes, self.kind.digest)
        table = b"".join(_ENTRY.pack(*entry) for entry in self.entries)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + table)) + table


def header_of(kind: BlockKind, blocks: Sequence[StoredBlock]) -> BatchHeader:
    """The header of a file with these blocks."""
    return BatchHeader(kind, [(block.block_hash, block.checksum) for block in blocks])


def write_batch(descriptor: int, header: BatchHeader, blocks: Sequence[StoredBlock]) -> None:
    """Write a whole file. Raises `OSError`, as when the disk is full."""
    pieces = [memoryview(header.packed()), *(block.content.data for block in blocks)]
    while pieces:
        written = os.writev(descriptor, pieces[:_MAX_PIECES])
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def read_header(descriptor: int) -> BatchHeader:
    """The header of an open file. Raises `DamagedFile` unless the file is whole, and `OSError`."""
    head = os.pread(descriptor, _TABLE_OFFSET, 0)
    if len(head) < _TABLE_OFFSET:
        raise DamagedFile("it has no header")
    magic, version, num_blocks, block_bytes, digest = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise DamagedFile("it is no file of KV blocks")
    if version != VERSION:
        raise DamagedFile(f"it has version {version}, not {VERSION}")
    if num_blocks > MAX_BLOCKS:
        raise DamagedFile("its header is damaged")
    table = os.pread(descriptor, num_blocks * _ENTRY.size, _TABLE_OFFSET)
    if _CHECKSUM.unpack_from(head, _HEAD.size) != (xxhash.xxh3_64_intdigest(head[: _HEAD.size] + table),):
        raise DamagedFile("its header is damaged")
    header = BatchHeader(BlockKind(block_bytes, digest), list(_ENTRY.iter_unpack(table)))
    if os.fstat(descriptor).st_size != header.num_bytes:
        raise DamagedFile(f"it has {os.fstat(descriptor).st_size} bytes, not {header.num_bytes}")
    return header
