"""Mounts for this process and its children alone: a small /dev/shm, which can be filled without harm to others, and a
folder that is read-only for a while."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_SIZE = "384m"
_LIBC = ctypes.CDLL(None, use_errno=True)


def mount() -> bool:
    """Give this process a /dev/shm of its own. False where that is not allowed (it needs root): then it is the
    machine's."""
    if os.geteuid() != 0 or _LIBC.unshare(_CLONE_NEWNS) != 0:
        return False
    if _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    mounted: int = _LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={_SIZE},mode=1777".encode())
    return mounted == 0


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nothing be written into a folder while the block runs; files that are open stay as they are. Only where
    `mount` has given this process mounts of its own. Raises `OSError`."""
    path = str(folder).encode()
    _require(_LIBC.mount(path, path, None, _MS_BIND, None))
    try:
        _require(_LIBC.mount(None, path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None))
        yield
    finally:
        _LIBC.umount2(path, _MNT_DETACH)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
