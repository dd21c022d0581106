"""`baton key FILE`: make the secret that the programs of one deployment share.

Owns the file's creation. Does not know who reads it; `wire.links.ClusterKey` does.
Invariants: only its owner can ever read the file, and an existing file is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from program.command_line import CommandParser
from wire.errors import InvalidSetting


def main(arguments: Sequence[str]) -> int:
    """Write a new cluster key and say where."""
    parser = CommandParser(
        prog="baton key",
        description="Write a new cluster key. Give every router and node the same file with --cluster-key.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write the key; must not exist")
    path: Path = parser.parse(arguments).file
    write_key(path)
    print(f"wrote a cluster key to {path}")
    return 0


def write_key(path: Path) -> None:
    """Write a CURVE secret (40 characters, Z85) with mode 0600. Raises `InvalidSetting` when `path` exists."""
    import zmq  # `baton key --help` does not need it

    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidSetting(f"{path} exists: a cluster key is never overwritten") from None
    except OSError as error:
        raise InvalidSetting(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret + b"\n")
