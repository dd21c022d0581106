"""The disk tier: a `KvStore` in files of a folder, which outlives the node and may be shared with others of its host.

Owns the memory of blocks that are not written yet, and the threads: one that writes and looks after the folder, and few
that read. Which block is where, what the format is, and which files give way, is known to the modules beside.

Invariants:
- no call waits for the disk. What a stalled one cannot take is dropped, and counted;
- a block is staged, or in a file of the index, or unknown here;
- the memory of staged blocks is used again, for fresh memory costs more than copying into it. So nobody holds on to
  that of a block without the lock, but the writing thread until the block is written;
- nothing is given whose checksum is wrong. A file with such a block is deleted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import numpy as np

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.disk.batch_file import MAX_BLOCKS, BatchHeader, DamagedFile, header_of, read_header
from baton.engine.cache.disk.block_index import BlockIndex
from baton.engine.cache.disk.folder import CacheFile, CacheFolder, open_file
from baton.engine.cache.disk.reader import BatchReader
from baton.engine.cache.fault_log import FaultLog
from baton.engine.cache.last_blocks import LastBlock, TimeLeft
from baton.engine.cache.store import REST_S, BlockBytes, BlockKind, Landing, StoredBlock, TierCounters

_FILE_BYTES = 2**25
_MIN_FILES = 8
"""As many files have room in a folder that is small, or else each would be all that there is."""
_STAGED_FILES = 2
"""As many full files lie in memory at most: one that is being written, and one that is being filled."""
_NUM_READERS = 2
_LINGER_S = 2.0
"""A file that is not full is written after it, and the files of other nodes are looked for."""
_MAX_WAITING = 256
_CLOSE_S = 5.0
_TICK_S = 0.05
"""So often whoever waits for a slow disk looks how much time is left."""
_READING, _KEEPING = "reading", "keeping files"
_log = logging.getLogger(__name__)


class DiskTier:
    """Blocks of `kind` in files of `folder`. `on_evicted`: is given the blocks of files that give way to new ones."""

    def __init__(
        self,
        folder: CacheFolder,
        kind: BlockKind,
        counters: TierCounters,
        on_evicted: Callable[[StoredBlock], object] | None = None,
    ) -> None:
        self._folder = folder
        self._kind = kind
        self._counters = counters
        self._on_evicted = on_evicted
        file_bytes = min(_FILE_BYTES, folder.max_bytes // _MIN_FILES)
        self._blocks_per_file = min(MAX_BLOCKS, max(1, file_bytes // kind.block_bytes))
        self._blocks = BlockIndex()
        self._spare: list[BlockBytes] = []
        self._faults = FaultLog("the disk tier")
        self._time_left_s: TimeLeft = lambda: _CLOSE_S
        self._is_closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._orders: queue.Queue[tuple[Sequence[bytes], Landing] | None] = queue.Queue(_MAX_WAITING)
        works = [self._keep] + [self._serve] * _NUM_READERS
        self._threads = [threading.Thread(target=work, name="disk-tier", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def usage(self) -> float:
        """How much of its room the files take, those of other nodes and models among them."""
        return self._folder.usage

    def follow(self, changes: BlockChanges) -> None:
        """Tell `changes` which blocks are there, and which come and leave."""
        with self._lock:
            self._blocks.follow(changes)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks it has, from the first on."""
        with self._lock:
            return next((place for place, each in enumerate(hashes) if each not in self._blocks), len(hashes))

    def holds(self, block_hash: bytes) -> bool:
        """Whether it has a block."""
        return self.lookup((block_hash,)) > 0

    def put(self, block: StoredBlock) -> None:
        """Stage a block for the writing thread, if there is room."""
        with self._work:
            if self._is_closed or block.block_hash in self._blocks:
                return
            if not self._has_room:
                self._counters.num_dropped_blocks += 1
                return
            content = self._spare.pop() if self._spare else np.empty_like(block.content)
            np.copyto(content, block.content)
            self._blocks.stage(block._replace(content=content))
            if len(self._blocks.staged) >= self._blocks_per_file:
                self._work.notify_all()

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        """Have a reading thread hand over these blocks, one after another."""
        try:
            self._orders.put_nowait((hashes, landing))
        except queue.Full:
            landing.ended()

    def forget(self, block_hash: bytes) -> None:
        """Drop a block. Its file keeps the bytes, and does not bring it back."""
        with self._lock:
            self._blocks.forget(block_hash)

    def keep_last(self, blocks: Sequence[LastBlock], time_left_s: TimeLeft) -> None:
        """Stage blocks as fast as they are written, while there is time and the disk does not fail, and as many as do
        not displace each other."""
        self._time_left_s = time_left_s
        full = BatchHeader(self._kind, [(b"", 0)] * self._blocks_per_file).num_bytes
        most, num_failures = self._folder.num_new_files(full) * self._blocks_per_file, self._counters.num_failures
        with self._lock:
            new = [each for each in blocks if each.block_hash not in self._blocks]
        num_left = len(new)
        for each in new[:most]:
            with self._work:
                while (left_s := time_left_s()) > 0 and not self._has_room:
                    self._work.wait(min(left_s, _TICK_S))
            if left_s <= 0 or self._counters.num_failures > num_failures:
                break
            self.put(each.read())
            num_left -= 1
        self._counters.num_dropped_blocks += num_left
        _log.info("%d blocks go to %s before the end, %d do not", len(new) - num_left, self._folder.path, num_left)

    @property
    def _has_room(self) -> bool:
        """Whether another block can be staged."""
        return len(self._blocks.staged) < _STAGED_FILES * self._blocks_per_file

    def close(self) -> None:
        """Write what is staged, and end the threads. A disk that stalls is waited for only so long."""
        with self._work:
            self._is_closed = True
            self._work.notify()
        deadline_s = time.monotonic() + min(_CLOSE_S, self._time_left_s())
        _end_all(self._orders)
        for _ in range(_NUM_READERS):
            with suppress(queue.Full):
                self._orders.put_nowait(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if num_lost := len(self._blocks.staged):
            self._counters.num_dropped_blocks += num_lost
            _log.warning("%d blocks were not written to %s before the end", num_lost, self._folder.path)

    # the reading threads

    def _serve(self) -> None:
        with closing(BatchReader(self._folder.path, self._kind.block_bytes)) as reader:
            while (order := self._orders.get()) is not None:
                try:
                    self._deliver(*order, reader)
                except Exception:  # whatever became of the landing, others wait for this thread
                    _log.exception("a load from the disk tier failed")
                finally:
                    reader.close()
                    order[1].ended()

    def _deliver(self, hashes: Sequence[bytes], landing: Landing, reader: BatchReader) -> None:
        for block_hash in hashes:
            if self._is_closed or landing.is_over:
                return
            block = self._found(block_hash, reader)
            if block is None or not landing.arrived(block):
                return

    def _found(self, block_hash: bytes, reader: BatchReader) -> StoredBlock | None:
        """A block, staged or read. None: it is not there any more, or not as it was."""
        with self._lock:
            if (staged := self._blocks.staged.get(block_hash)) is not None:
                return reader.copied(staged)
            place = self._blocks.place_of(block_hash)
        if place is None:
            return None
        try:
            block = reader.read(block_hash, place)
            self._faults.worked(_READING)
            return block
        except FileNotFoundError:
            self._lose(place.file)
        except DamagedFile as error:
            self._damaged(place.file, error)
            with suppress(OSError):
                os.unlink(self._folder.path / place.file)
        except OSError as error:
            self._failed(_READING, error)
            self._lose(place.file)
        return None

    # the writing thread

    def _keep(self) -> None:
        is_over = False
        while not is_over:
            try:
                self._look()
                is_over = not self._write_next()
            except Exception as error:  # what is staged after it still wants to be written
                self._failed(_KEEPING, error)
                self._counters.num_rests += 1
                with self._work:  # a disk that has failed is left alone
                    is_over = self._work.wait_for(lambda: self._is_closed, REST_S)

    def _write_next(self) -> bool:
        """Write what is staged; False when nothing is, and nothing will be."""
        batch = self._next_batch()
        if batch:
            self._look()  # other nodes may have written meanwhile, and the room is one for all
            self._write(batch)
        return bool(batch) or not self._is_closed

    def _look(self) -> None:
        """Learn what other nodes have written and deleted; at first, what is there."""
        new, gone = self._folder.refresh()
        for file in gone:
            self._lose(file.name)
        for file in new:
            if file.folder == self._kind.digest.hex():
                self._take_over(file)

    def _take_over(self, file: CacheFile) -> None:
        try:
            header = _header_in(self._folder.path / file.name)
            if header.kind != self._kind:
                raise DamagedFile("its blocks are of another kind")
            with self._lock:
                self._blocks.note(file.name, header, lambda _: True)
        except DamagedFile as error:
            self._damaged(file.name, error)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failed(_READING, error)

    def _next_batch(self) -> list[StoredBlock]:
        """Wait for the blocks of a full file, or for `_LINGER_S`."""
        with self._work:
            self._work.wait_for(lambda: self._is_closed or len(self._blocks.staged) >= self._blocks_per_file, _LINGER_S)
            return list(islice(self._blocks.staged.values(), self._blocks_per_file))

    def _write(self, batch: Sequence[StoredBlock]) -> None:
        try:
            self._make_room(header_of(self._kind, batch).num_bytes)
            file, header = self._folder.write(self._kind, batch)
        except OSError:
            self._counters.num_dropped_blocks += len(batch)
            raise
        else:
            self._faults.worked(_KEEPING)
            with self._lock:  # what was not forgotten while it was written
                self._blocks.note(file.name, header, self._blocks.staged.__contains__)
        finally:
            with self._lock:
                for block in batch:
                    self._blocks.unstage(block.block_hash)
                    self._spare.append(block.content)
                self._work.notify_all()

    def _make_room(self, num_bytes: int) -> None:
        while file := self._folder.in_the_way(num_bytes):
            if self._on_evicted is not None:
                self._hand_down(file.name, self._on_evicted)
            self._folder.delete(file)
            self._lose(file.name)

    def _hand_down(self, name: str, on_evicted: Callable[[StoredBlock], object]) -> None:
        with closing(BatchReader(self._folder.path, self._kind.block_bytes)) as reader:
            for block_hash in self._blocks.blocks_of(name):
                block = self._found(block_hash, reader)
                if block is None:
                    return
                on_evicted(block)

    # what is gone

    def _lose(self, name: str) -> None:
        """The blocks of a file cannot be loaded any more."""
        with self._lock:
            self._blocks.lose(name)

    def _damaged(self, name: str, error: DamagedFile) -> None:
        self._lose(name)
        _log.warning("the KV cache file %s is not used: %s", self._folder.path / name, error)
        self._counters.num_damaged_blocks += 1

    def _failed(self, what: str, error: Exception) -> None:
        self._counters.num_failures += 1
        self._faults.failed(what, f"failed at {what}: {error}")


def _end_all(orders: queue.Queue[tuple[Sequence[bytes], Landing] | None]) -> None:
    with suppress(queue.Empty):
        while True:
            order = orders.get_nowait()
            if order is not None:
                order[1].ended()


def _header_in(path: Path) -> BatchHeader:
    descriptor = open_file(path)
    try:
        return read_header(descriptor)
    finally:
        os.close(descriptor)
