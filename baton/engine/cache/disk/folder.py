"""The files of a disk tier: which there are, which give way, and how one comes into being.

Owns the names below one folder, and the bytes that all of them take. A model, with its layout, has a folder of its own
there, named by the digest of its blocks' kind. Several nodes may share the folder: each writes files of its own, sees
those of others when it looks (`refresh`), and may delete any. Knows no blocks in memory and no thread; its calls come
from one at a time.

Invariants:
- a file has its name when it is whole. Before that it has a hidden one, and is locked for as long as its writer lives.
  Without a writer it is deleted, by whoever looks;
- what lies below the folder under other names is never read and never deleted;
- no name comes from outside.

A file that was loaded from is read-only, and its time is that of the last load, so all nodes know both, also after a
restart. Files that were never loaded from give way first, the oldest first, unless they take less than a fifth: so a
scan of prompts that come once cannot push out what is used again (2Q, of which the fifth is the usual share).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton.engine.cache.disk.batch_file import BatchHeader, header_of, write_batch
from baton.engine.cache.store import KIND_BYTES, BlockKind, StoredBlock

MIN_FREE_BYTES = 2**30
_FRESH_SHARE = 0.2
_FRESH_MODE, _REUSED_MODE = 0o600, 0o400
_FOLDER_MODE = 0o700
_OTHERS_WRITE = 0o022
_FOLDER_NAME = re.compile(rf"[0-9a-f]{{{2 * KIND_BYTES}}}")
_FILE_NAME = re.compile(r"[0-9a-f]{16}-\d{1,12}\.kv")
_UNFINISHED_NAME = re.compile(rf"\.{_FILE_NAME.pattern}")


@dataclass(slots=True)
class CacheFile:
    """A file of blocks. `name`: of its folder and itself; `used_ns`: when it was written or last loaded from, in the
    file system's time."""

    name: str
    num_bytes: int
    used_ns: int
    is_reused: bool

    @property
    def folder(self) -> str:
        """The folder of its kind of blocks."""
        return self.name.partition("/")[0]

    def note(self, found: os.stat_result) -> bool:
        """Take over what the file system says; whether that is news."""
        used_ns, is_reused = found.st_mtime_ns, not found.st_mode & stat.S_IWUSR
        is_news = (used_ns, is_reused) != (self.used_ns, self.is_reused)
        self.used_ns, self.is_reused = used_ns, is_reused
        return is_news


def open_file(path: Path | str) -> int:
    """Open a file for reading, if it is one. Raises `OSError`."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def mark_used(descriptor: int) -> None:
    """This file was loaded from. A folder that cannot be written cannot say so."""
    with suppress(OSError):
        os.utime(descriptor)
        os.fchmod(descriptor, _REUSED_MODE)


class CacheFolder:
    """The files below `path`, which take at most `max_bytes` and leave `min_free_bytes` of the file system."""

    def __init__(self, path: Path, max_bytes: int, min_free_bytes: int = MIN_FREE_BYTES) -> None:
        self.path = path
        self.files: dict[str, CacheFile] = {}
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._writer, self._num_written = secrets.token_hex(8), 0
        self._seen: Sequence[tuple[str, int]] | None = None

    @property
    def usage(self) -> float:
        """How much of its room is taken."""
        return self.num_bytes / self.max_bytes

    def refresh(self) -> tuple[list[CacheFile], list[CacheFile]]:
        """Look again, if any folder has changed: files that are new, and files that are gone. Raises `OSError`."""
        folders = self._folders()
        if folders == self._seen:
            return [], []
        present = {name: entry for folder, _ in folders for name, entry in self._listed(folder)}
        gone = [file for name, file in self.files.items() if name not in present]
        new = [file for name, entry in present.items() if name not in self.files if (file := _described(name, entry))]
        for file in gone:
            self._forget(file)
        for file in new:
            self._add(file)
        self._seen = folders
        return new, gone

    def kinds(self) -> list[str]:
        """The names of the folders of kinds. Raises `OSError`."""
        return [name for name, _ in self._folders()]

    def write(self, kind: BlockKind, blocks: Sequence[StoredBlock]) -> tuple[CacheFile, BatchHeader]:
        """Write a file for which there is room. Raises `OSError`, and leaves nothing then."""
        header = header_of(kind, blocks)
        folder = kind.digest.hex()
        (self.path / folder).mkdir(_FOLDER_MODE, exist_ok=True)
        if not _is_ours(os.lstat(self.path / folder)):
            raise PermissionError(errno.EACCES, "others may write into it", str(self.path / folder))
        self._num_written += 1
        name = f"{self._writer}-{self._num_written}.kv"
        with self._unfinished(self.path / folder / f".{name}") as descriptor:
            write_batch(descriptor, header, blocks)
            os.rename(self.path / folder / f".{name}", self.path / folder / name)
            found = os.fstat(descriptor)
        file = CacheFile(f"{folder}/{name}", header.num_bytes, found.st_mtime_ns, is_reused=False)
        self._add(file)
        return file, header

    def in_the_way(self, num_bytes: int) -> CacheFile | None:
        """The file that has to go before so many bytes have room; None: they have. Raises `OSError` where nothing
        helps."""
        free = os.statvfs(self.path)
        has_space = free.f_bavail * free.f_frsize - num_bytes >= self._min_free_bytes
        if has_space and self.num_bytes + num_bytes <= self.max_bytes:
            return None
        if num_bytes > self.max_bytes or not self.files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return self._first_to_go()

    def num_new_files(self, num_bytes: int) -> int:
        """How many new files of so many bytes it takes before they displace each other. May be called at any time."""
        free = os.statvfs(self.path)
        room = min(self.max_bytes, self.num_bytes + free.f_bavail * free.f_frsize - self._min_free_bytes)
        reused = sum(file.num_bytes for file in list(self.files.values()) if file.is_reused)
        return max(0, int(max(room - reused, _FRESH_SHARE * room)) // num_bytes)

    def delete(self, file: CacheFile) -> None:
        """Delete a file, if it is there. Raises `OSError` where that cannot be done."""
        with suppress(FileNotFoundError):
            os.unlink(self.path / file.name)
        self._forget(file)

    def _first_to_go(self) -> CacheFile:
        while True:
            fresh = [file for file in self.files.values() if not file.is_reused]
            is_ample = sum(file.num_bytes for file in fresh) >= _FRESH_SHARE * self.num_bytes
            first = min(fresh if is_ample else self.files.values(), key=lambda file: file.used_ns)
            try:
                is_news = first.note(os.lstat(self.path / first.name))
            except FileNotFoundError:
                return first
            if not is_news:  # no node has used it since this one looked
                return first

    def _add(self, file: CacheFile) -> None:
        self.files[file.name] = file
        self.num_bytes += file.num_bytes

    def _forget(self, file: CacheFile) -> None:
        if self.files.pop(file.name, None) is not None:
            self.num_bytes -= file.num_bytes

    def _folders(self) -> list[tuple[str, int]]:
        """The names of the folders of kinds, and when each was last changed."""
        with os.scandir(self.path) as entries:
            found = [(entry.name, entry) for entry in entries if _FOLDER_NAME.fullmatch(entry.name)]
        stats = [(name, entry.stat(follow_symlinks=False)) for name, entry in sorted(found)]
        return [(name, each.st_mtime_ns) for name, each in stats if _is_ours(each)]

    def _listed(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        with suppress(FileNotFoundError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name):
                    yield f"{folder}/{entry.name}", entry
                elif _UNFINISHED_NAME.fullmatch(entry.name):
                    _delete_abandoned(entry)

    @contextmanager
    def _unfinished(self, path: Path) -> Iterator[int]:
        """A new locked file, which is deleted where it is not finished."""
        descriptor = _made(path)
        try:
            yield descriptor
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)


def _described(name: str, entry: os.DirEntry[str]) -> CacheFile | None:
    """A file as it is; None: it has gone meanwhile, or is no file."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    file = CacheFile(name, found.st_size, 0, is_reused=False)
    file.note(found)
    return file


def _is_ours(found: os.stat_result) -> bool:
    """Whether a folder is one into which nobody else writes."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _made(path: Path) -> int:
    """A new locked file. Who looks before it is locked takes it for abandoned and deletes it; then it is made again."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FRESH_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _delete_abandoned(entry: os.DirEntry[str]) -> None:
    """Delete an unfinished file that nobody has locked: its writer is gone, or makes it again (`_made`)."""
    with suppress(OSError):
        descriptor = open_file(entry.path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(entry.path)
        finally:
            os.close(descriptor)
