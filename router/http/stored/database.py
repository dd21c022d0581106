"""Stored responses in an SQLite database: in memory, or in a file that several routers of a machine may share.

Owns the tables, the file and its version, and the bounds: in bytes, responses and age. A response is stored with the
new items of its input and the id of the one that it follows, not with the whole conversation. Those that follow each
other are one conversation, which is forgotten as a whole: when no response was added for too long, or when room is
needed, first of the owner that has most and of that the one that rested longest. Does not know HTTP, nor what is in an
item. Blocks: it belongs on a thread of its own.

Invariants: a response is found by its id together with its owner. One that was removed is overwritten in the file, and
the log beside it is emptied. What is damaged is never returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.router.http.private_folder import make_private_folder
from baton.wire.errors import InvalidSetting

FLAG = "--responses-store"
FILE_NAME = "responses.sqlite"
MAX_RESPONSES = 2**16
MAX_TURNS = 1024
"""Of a conversation that is read. A turn has two items at least, and a request may have twice as many."""
_VERSION = 1
_BUSY_S = 2.0
"""How long another router of the machine may write."""
_MAX_LOG_BYTES = 4 * 2**20
_PAYLOAD_BYTES, _NUM_MORE_PAGES = 4000, 8
"""What at least a page of the file holds, and how many pages a response may take beside its own bytes."""
_TABLES = (
    "CREATE TABLE conversation (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, used_at REAL NOT NULL, "
    "num_bytes INTEGER NOT NULL)",
    "CREATE INDEX by_use ON conversation (used_at)",
    "CREATE TABLE turn (owner TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, conversation INTEGER NOT NULL, "
    "items BLOB NOT NULL, response BLOB NOT NULL, digest BLOB NOT NULL, UNIQUE (owner, id))",
    "CREATE INDEX by_conversation ON turn (conversation)",
    f"PRAGMA user_version = {_VERSION}",
)
_FIND = (
    "SELECT turn.rowid, previous, conversation, length(items) + length(response) FROM turn JOIN conversation "
    "ON number = conversation WHERE turn.owner = ? AND id = ? AND used_at >= ?"
)
_OLDEST = (
    "SELECT number FROM conversation WHERE number != :kept AND owner = (SELECT owner FROM conversation "
    "WHERE number != :kept GROUP BY owner ORDER BY sum(num_bytes) DESC LIMIT 1) ORDER BY used_at LIMIT 1"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A response, and the items of the input that only it has, both as JSON. `previous_id`: of the response it
    follows."""

    response_id: str
    previous_id: str | None
    items: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its content."""
        return len(self.items) + len(self.response)

    def digest(self, owner: str) -> bytes:
        """What tells a damaged row."""
        found = hashlib.blake2b(digest_size=16)
        for part in (owner.encode(), self.response_id.encode(), (self.previous_id or "").encode(), self.items):
            found.update(len(part).to_bytes(8, "big") + part)
        found.update(self.response)
        return found.digest()


class Unfit(Exception):
    """A response cannot be stored, or a conversation not be read; the message says why."""


class Database:
    """Stored responses of at most `max_bytes`, each conversation for `keep_s` seconds after its last one. `folder`:
    None keeps them in memory. Methods may raise `sqlite3.Error`."""

    def __init__(
        self, folder: Path | None, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since 1970, since only they are the same in the next life. Raises `InvalidSetting`."""
        self.num_evicted = 0
        """Responses that gave way to others."""
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._has_leftovers = True  # of an earlier life that was killed
        self._is_file = folder is not None
        self._link = _in_memory() if folder is None else _in_file(folder)

    def put(self, owner: str, turn: Turn) -> None:
        """Store a response, unless it is stored already. Raises `Unfit` when the one it follows is gone, and when there
        is no room for it."""
        with self._transaction():
            known = "SELECT 1 FROM turn WHERE owner = ? AND id = ?"
            if self._link.execute(known, (owner, turn.response_id)).fetchone():
                return
            conversation = self._conversation(owner, turn)
            self._make_room(turn.num_bytes, conversation)
            names = (owner, turn.response_id, turn.previous_id, conversation)
            content = (turn.items, turn.response, turn.digest(owner))
            self._link.execute("INSERT INTO turn VALUES (?, ?, ?, ?, ?, ?, ?)", (*names, *content))
            update = "UPDATE conversation SET used_at = ?, num_bytes = num_bytes + ? WHERE number = ?"
            self._link.execute(update, (self._clock(), turn.num_bytes, conversation))

    def get(self, owner: str, response_id: str) -> Turn | None:
        """The response, None when there is none."""
        found = self.conversation(owner, response_id, max_turns=1)
        return found[0] if found else None

    def conversation(
        self, owner: str, response_id: str, max_bytes: int = 2**63, max_turns: int = MAX_TURNS + 1
    ) -> list[Turn]:
        """The response and those before it, the first one first; empty when there is no such response. Where one
        between is gone, the list begins behind it. Raises `Unfit` for more than `max_bytes` or `MAX_TURNS`."""
        rows: list[tuple[int, str, str | None]] = []
        next_id: str | None = response_id
        with self._transaction("DEFERRED"):
            while next_id is not None and len(rows) < max_turns:
                row = self._link.execute(_FIND, (owner, next_id, self._clock() - self._keep_s)).fetchone()
                if row is None:
                    break
                rows.append((row[0], next_id, row[1]))
                max_bytes -= row[3]
                if max_bytes < 0 or len(rows) > MAX_TURNS:
                    raise Unfit("the conversation is too long")
                next_id = row[1]
            return [self._turn(owner, *row) for row in reversed(rows)]

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response; whether there was one. Those that follow it stay, without it."""
        with self._transaction():
            row = self._link.execute(_FIND, (owner, response_id, 0.0)).fetchone()
            if row is None:
                return False
            rowid, _, conversation, num_bytes = row
            self._link.execute("DELETE FROM turn WHERE rowid = ?", (rowid,))
            if self._link.execute("SELECT 1 FROM turn WHERE conversation = ? LIMIT 1", (conversation,)).fetchone():
                update = "UPDATE conversation SET num_bytes = num_bytes - ? WHERE number = ?"
                self._link.execute(update, (num_bytes, conversation))
            else:
                self._link.execute("DELETE FROM conversation WHERE number = ?", (conversation,))
            self._has_leftovers = True
        self.clean()
        return True

    def expire(self) -> None:
        """Remove what is too old, and what may be left of all that was removed."""
        with self._transaction():
            self._remove_expired()
        self.clean()

    def clean(self) -> None:
        """Empty the log of the file, which may hold what was removed. Where another router is reading, that is left to
        the next call."""
        if self._has_leftovers and self._is_file:
            (is_busy, *_) = self._link.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._has_leftovers = bool(is_busy)

    @property
    def num_responses(self) -> int:
        """How many are stored, of all routers together."""
        return self._number("SELECT count(*) FROM turn")

    @property
    def num_bytes(self) -> int:
        """Bytes that are used, of the file or in memory."""
        used = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return used * self._number("PRAGMA page_size")

    def close(self) -> None:
        """Close the file."""
        self._link.close()

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._link.execute(f"BEGIN {kind}")
        try:
            yield
            self._link.execute("COMMIT")
        except BaseException:
            if self._link.in_transaction:
                self._link.execute("ROLLBACK")
            raise

    def _conversation(self, owner: str, turn: Turn) -> int:
        """The number of the conversation that `turn` belongs to, or begins."""
        if turn.previous_id is None:
            begun = self._link.execute("INSERT INTO conversation VALUES (NULL, ?, ?, 0)", (owner, self._clock()))
            return int(begun.lastrowid or 0)
        row = self._link.execute(_FIND, (owner, turn.previous_id, 0.0)).fetchone()
        if row is None:
            raise Unfit("the response that it follows is gone")
        return int(row[2])

    def _make_room(self, num_bytes: int, kept: int) -> None:
        """Forget conversations until a response of `num_bytes` fits, but for the one with the number `kept`."""
        room = self._max_bytes - (num_bytes // _PAYLOAD_BYTES + _NUM_MORE_PAGES) * self._number("PRAGMA page_size")
        self._remove_expired(kept)
        while self.num_bytes > room or self.num_responses >= MAX_RESPONSES:
            oldest = self._link.execute(_OLDEST, {"kept": kept}).fetchone()
            if oldest is None:
                raise Unfit("there is no room for its conversation")
            self.num_evicted += self._forget(oldest[0])

    def _remove_expired(self, kept: int = 0) -> None:
        query = "SELECT number FROM conversation WHERE used_at < ? AND number != ?"
        for (number,) in self._link.execute(query, (self._clock() - self._keep_s, kept)).fetchall():
            self._forget(number)

    def _forget(self, conversation: int) -> int:
        """Remove a conversation; the number of its responses."""
        self._has_leftovers = True
        self._link.execute("DELETE FROM conversation WHERE number = ?", (conversation,))
        return self._link.execute("DELETE FROM turn WHERE conversation = ?", (conversation,)).rowcount

    def _turn(self, owner: str, rowid: int, response_id: str, previous_id: str | None) -> Turn:
        query = "SELECT items, response, digest FROM turn WHERE rowid = ?"
        items, response, digest = self._link.execute(query, (rowid,)).fetchone()
        turn = Turn(response_id, previous_id, items, response)
        if turn.digest(owner) != digest:
            raise sqlite3.DatabaseError("a stored response is damaged")
        return turn

    def _number(self, query: str) -> int:
        return int(self._link.execute(query).fetchone()[0])


def _in_memory() -> sqlite3.Connection:
    link = _connected(":memory:")
    _execute_all(link, _TABLES)
    return link


def _in_file(folder: Path) -> sqlite3.Connection:
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


def _execute_all(link: sqlite3.Connection, statements: Sequence[Any]) -> None:
    for statement in statements:
        link.execute(statement)
