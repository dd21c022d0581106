"""The SQLite database of stored responses: its tables, and how it is opened, in memory or as a file in a folder.

Owns the tables, the version and the modes of the file, and that a database is there as a whole or not at all. Several
routers of a machine may open the same file. Does not know what the rows mean.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from baton.router.http.private_folder import make_private_folder
from baton.wire.errors import InvalidSetting

FLAG = "--responses-store"
FILE_NAME = "responses.sqlite"
_VERSION = 2
_BUSY_S = 2.0
"""How long another router of the machine may write."""
_MAX_LOG_BYTES = 4 * 2**20
_TABLES = (
    # one without an id is that of responses which follow each other
    "CREATE TABLE conversation (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT, created_at INTEGER NOT NULL, "
    "metadata BLOB NOT NULL, digest BLOB NOT NULL, version INTEGER NOT NULL, used_at REAL NOT NULL, "
    "num_bytes INTEGER NOT NULL, UNIQUE (owner, id))",
    "CREATE INDEX by_use ON conversation (used_at)",
    "CREATE TABLE turn (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT, previous TEXT, "
    "conversation INTEGER NOT NULL, response BLOB NOT NULL, digest BLOB NOT NULL, UNIQUE (owner, id))",
    "CREATE INDEX by_conversation ON turn (conversation)",
    "CREATE TABLE item (number INTEGER PRIMARY KEY, turn INTEGER NOT NULL, is_output INTEGER NOT NULL, "
    "id TEXT NOT NULL, digest BLOB NOT NULL, content BLOB NOT NULL)",
    "CREATE INDEX by_turn ON item (turn)",
    f"PRAGMA user_version = {_VERSION}",
)


def open_in_memory() -> sqlite3.Connection:
    """An empty database."""
    link = _connected(":memory:")
    _execute_all(link, _TABLES)
    return link


def open_in_folder(folder: Path) -> sqlite3.Connection:
    """The database of a folder, made where there is none. Raises `InvalidSetting`."""
    make_private_folder(folder, FLAG, "conversations")
    path = folder / FILE_NAME
    try:
        if not path.exists():
            _publish_empty(path)
        link = _connected(str(path))
        version, mode = (link.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "journal_mode"))
        link.execute("BEGIN IMMEDIATE")  # of a file that can only be read this makes a reader
        link.execute(f"PRAGMA user_version = {version}")
        link.execute("ROLLBACK")
    except (OSError, sqlite3.Error) as error:
        raise InvalidSetting(f"{FLAG} {folder}: {getattr(error, 'strerror', None) or error}") from None
    if (version, mode) != (_VERSION, "wal"):
        raise InvalidSetting(f"{FLAG} {folder}: {FILE_NAME} is of another version, so move it away")
    return link


def _publish_empty(path: Path) -> None:
    """Make an empty database of which no other router sees less than the whole: two that change the journal's mode at
    once would refuse each other."""
    draft = path.with_name(f"{secrets.token_hex(8)}.draft")
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(_connected(str(draft))) as link:
            _execute_all(link, ("PRAGMA journal_mode = WAL", *_TABLES))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def _connected(name: str) -> sqlite3.Connection:
    # opened where settings are checked, and used by one thread
    link = sqlite3.connect(name, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    pragmas = {
        "secure_delete": "ON",
        "synchronous": "NORMAL",
        "temp_store": "MEMORY",
        "cell_size_check": "ON",
        "trusted_schema": "OFF",
        "journal_size_limit": _MAX_LOG_BYTES,
    }
    _execute_all(link, [f"PRAGMA {name} = {value}" for name, value in pragmas.items()])
    return link


def _execute_all(link: sqlite3.Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        link.execute(statement)
