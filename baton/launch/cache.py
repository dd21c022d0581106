"""`baton cache list|verify|empty PATH`: look at a folder of `--kv-disk`, check it, or make it empty.

Owns what is printed. The files, and which are Baton's, are known to `baton.engine.cache.disk`. Nodes may use the folder
meanwhile. The status of `verify` is 1 when a file is damaged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np

from baton.engine.cache.disk.batch_file import BatchHeader, DamagedFile, read_header
from baton.engine.cache.disk.folder import CacheFile, CacheFolder, open_file
from baton.engine.cache.store import checksum_of
from baton.runtime.command_line import CommandParser
from baton.runtime.exit_status import FAILED_STATUS
from baton.wire.errors import InvalidSetting

_MIB = 2**20
_TIMES = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def main(arguments: Sequence[str]) -> int:
    """Do what is asked; the exit status."""
    parser = CommandParser(
        prog="baton cache", description="Look at a folder of --kv-disk, check it, or make it empty. Nodes may use it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (doc, _) in _COMMANDS.items():
        commands.add_parser(name, help=doc, description=f"{doc.capitalize()}.").add_argument(
            "path", metavar="PATH", type=Path, help="the folder of --kv-disk"
        )
    options = parser.parse(arguments)
    _, run = _COMMANDS[options.command]
    try:
        return run(options.path)
    except OSError as error:
        raise InvalidSetting(f"{error.filename or options.path} cannot be used: {error.strerror}") from None


def list_files(path: Path) -> int:
    """Print a line for each model: its digest, files, blocks, bytes, and when a file was last used."""
    print(f"{'model':<32}  {'files':>7}  {'blocks':>9}  {'MiB':>9}  last used")
    for folder, group in groupby(_files(path), key=lambda file: file.folder):
        files = list(group)
        num_blocks = sum(len(header.entries) for file in files if (header := _header(path / file.name)))
        num_mib, used_s = sum(file.num_bytes for file in files) / _MIB, max(file.used_ns for file in files) / 1e9
        print(f"{folder}  {len(files):>7}  {num_blocks:>9}  {num_mib:>9.1f}  {_ago(time.time() - used_s)}")
    return 0


def verify_files(path: Path) -> int:
    """Read all files; print those that are damaged, and how many there are."""
    num_damaged, num_files = 0, 0
    for file in _files(path):
        num_files += 1
        if reason := _damage(path / file.name):
            num_damaged += 1
            print(f"{path / file.name}: {reason}")
    print(f"{num_files} files, {num_damaged} damaged")
    return FAILED_STATUS if num_damaged else 0


def empty_folder(path: Path) -> int:
    """Delete the files of all models, and their folders; what else is there stays."""
    folder, num_files, num_bytes = _cache_folder(path), 0, 0
    for file in list(folder.files.values()):
        folder.delete(file)
        num_files, num_bytes = num_files + 1, num_bytes + file.num_bytes
    for kind in folder.kinds():
        with suppress(OSError):  # others may have put something there
            os.rmdir(path / kind)
    print(f"deleted {num_files} files, {num_bytes / _MIB:.1f} MiB")
    return 0


def _cache_folder(path: Path) -> CacheFolder:
    folder = CacheFolder(path, max_bytes=1)
    folder.refresh()
    return folder


def _files(path: Path) -> list[CacheFile]:
    return sorted(_cache_folder(path).files.values(), key=lambda file: file.name)


def _header(path: Path) -> BatchHeader | None:
    """What is in a file; None: it is damaged, or has gone."""
    with suppress(DamagedFile, FileNotFoundError), open(open_file(path), "rb") as file:
        return read_header(file.fileno())
    return None


def _damage(path: Path) -> str:
    """What is wrong with a file; "": nothing, or it has gone."""
    try:
        with open(open_file(path), "rb") as file:
            header = read_header(file.fileno())
            if header.kind.digest.hex() != path.parent.name:
                return "its blocks are of another model"
            for number, (block_hash, checksum) in enumerate(header.entries):
                read = os.pread(file.fileno(), header.kind.block_bytes, header.block_offset(number))
                if checksum_of(block_hash, np.frombuffer(read, dtype=np.uint8)) != checksum:
                    return f"block {number} has wrong bytes"
    except DamagedFile as error:
        return str(error)
    except FileNotFoundError:
        pass
    return ""


def _ago(seconds: float) -> str:
    for unit, length_s in _TIMES:
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return "now"


_COMMANDS: dict[str, tuple[str, Callable[[Path], int]]] = {
    "list": ("show how much KV of which models there is", list_files),
    "verify": ("read all files, and name those that are damaged", verify_files),
    "empty": ("delete the files of all models", empty_folder),
}
