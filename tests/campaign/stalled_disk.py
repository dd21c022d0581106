"""A disk that stalls: while anything lies in the folder beside that of a disk tier, the tier's calls for files wait.

Stands in for the module `os` in the modules of the tier, so it is theirs alone: the program's logs and segments are
written all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from baton.engine.cache.disk import batch_file, disk_tier, folder, reader

_FLAG = "--kv-disk"
_LOOK_S = 0.02
_LONGEST_S = 60.0


def stalls_of(path: Path) -> Path:
    """The folder beside that of a disk tier."""
    return path.with_name(f"{path.name}-stalls")


@contextmanager
def obeyed(flags: Sequence[str]) -> Iterator[None]:
    """Let the disk tier of a program with these flags stall when it has to."""
    with ExitStack() as stack:
        if _FLAG in flags:
            stalling = _StallingOs(stalls_of(Path(flags[flags.index(_FLAG) + 1])))
            for module in (batch_file, disk_tier, folder, reader):
                stack.enter_context(mock.patch.object(module, "os", stalling))
        yield


class _StallingOs:
    def __init__(self, stalls: Path) -> None:
        self._stalls = stalls

    def __getattr__(self, name: str) -> Any:
        until_s = time.monotonic() + _LONGEST_S
        while os.listdir(self._stalls) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return getattr(os, name)
