"""A folder that holds prompts or answers: only its owner may enter it."""

from __future__ import annotations

import os
from pathlib import Path

from baton.wire.errors import InvalidSetting


def make_private_folder(path: Path, flag: str, holds: str) -> None:
    """Make the folder where there is none. Raises `InvalidSetting`, which names `flag` and what the folder `holds`,
    when it cannot be used or others may enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise InvalidSetting(f"{flag} {path}: {error.strerror or error}") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidSetting(f"{flag} {path}: it holds {holds}, so only its owner may enter (mode 0700)")
