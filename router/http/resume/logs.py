"""Where journals of streams are kept: in memory, or as files that outlive the router.

A journal file has the mode 0600 in a folder that only its owner can enter, and belongs to one router at a time. Its
name is made of the id that the router has chosen for the stream; no name comes from a client. A file that is removed
has another name at once, by which nobody finds it, and its blocks are given back by a thread: where the file system
trims them meanwhile (ext4 with `discard`), that took up to 14 s on a busy disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from baton.router.http.private_folder import make_private_folder
from baton.wire.errors import InvalidSetting

_NAME = re.compile(r"([a-z_]+-[0-9a-f]{24,32})\.stream", re.ASCII)
_LOCK_NAME = "owner.lock"
_REMOVED = ".removed"
_MAX_REMOVALS = 4096
_LAST_REMOVALS_S = 2.0


class Log(Protocol):
    """Bytes that are appended to."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...

    def append(self, data: bytes) -> None:
        """Add `data`. Raises `OSError`."""
        ...

    def read(self) -> bytes:
        """Everything. Raises `OSError`."""
        ...

    def rest(self) -> None:
        """Nothing is going to be appended for a while."""
        ...

    def remove(self) -> None:
        """Forget all of it."""
        ...


class LogPlace(Protocol):
    """A place for logs."""

    def create(self, name: str) -> Log:
        """A new log. Raises `OSError`."""
        ...

    def found(self, max_age_s: float) -> Iterator[tuple[str, Log]]:
        """Names and logs that an earlier router has left; those that are older are removed."""
        ...

    def close(self) -> None:
        """Give the place up; logs that were not removed stay if they can."""
        ...


class _MemoryLog:
    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    def append(self, data: bytes) -> None:
        self._data += data

    def read(self) -> bytes:
        return bytes(self._data)

    def rest(self) -> None:
        """Nothing is open."""

    def remove(self) -> None:
        self._data.clear()


class Memory:
    """Logs that do not outlive this process."""

    def create(self, name: str) -> Log:
        return _MemoryLog()

    def found(self, max_age_s: float) -> Iterator[tuple[str, Log]]:
        return iter(())

    def close(self) -> None:
        """Nothing stays."""


class _FileLog:
    """The file is open from its first `append` to the next `rest`."""

    def __init__(self, path: Path, removals: _Removals, num_bytes: int = 0) -> None:
        self._num_bytes = num_bytes
        self._path = path
        self._removals = removals
        self._fd = -1

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def append(self, data: bytes) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
        # what is in the system's cache outlives this process; it need not outlive the machine
        if os.write(self._fd, data) != len(data):
            raise OSError("a short write")
        self._num_bytes += len(data)

    def read(self) -> bytes:
        return self._path.read_bytes()

    def rest(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        self.rest()
        with contextlib.suppress(FileNotFoundError):
            self._removals.add(self._path.rename(f"{self._path}{_REMOVED}"))


class _Removals:
    """Unlinks files on a thread of its own, in the order in which they come. When more than `_MAX_REMOVALS` are due,
    whoever adds one unlinks it."""

    def __init__(self) -> None:
        self._due: queue.Queue[Path | None] = queue.Queue(_MAX_REMOVALS)
        self._thread = threading.Thread(target=self._run, name="journal removals", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Unlink `path` soon."""
        try:
            self._due.put_nowait(path)
        except queue.Full:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait a moment for those that are due; the next router unlinks the others."""
        with contextlib.suppress(queue.Full):
            self._due.put_nowait(None)
        self._thread.join(_LAST_REMOVALS_S)

    def _run(self) -> None:
        while (path := self._due.get()) is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class Folder:
    """Logs as files in a folder. Raises `InvalidSetting` when it cannot be used, or is used by another router."""

    def __init__(self, path: Path) -> None:
        self._path = path
        make_private_folder(path, "--journal-dir", "prompts")
        try:
            self._lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidSetting(f"--journal-dir {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InvalidSetting(f"--journal-dir {path} is used by another router") from None
        self._removals = _Removals()

    def create(self, name: str) -> Log:
        return _FileLog(self._path / f"{name}.stream", self._removals)

    def found(self, max_age_s: float) -> Iterator[tuple[str, Log]]:
        for path in sorted(self._path.iterdir()):
            match = _NAME.fullmatch(path.name.removesuffix(_REMOVED))
            if match is None:
                continue
            if path.name.endswith(_REMOVED):
                self._removals.add(path)
                continue
            status = path.lstat()
            log = _FileLog(path, self._removals, status.st_size)
            if time.time() - status.st_mtime < max_age_s:
                yield match[1], log
            else:
                log.remove()

    def close(self) -> None:
        self._removals.close()
        os.close(self._lock)
