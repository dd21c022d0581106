"""Stored conversations: the turns and items of an SQLite database, and its bounds in bytes, rows and age.

A conversation is forgotten as a whole: when nothing was added for too long, or when room is needed, first of the owner
that has most and of that the one that rested longest. Owns rows and bounds; `responses` and `conversations` say which
turns a client means. Does not know HTTP, nor what is in an item. Blocks: it belongs on a thread of its own.

Invariants: what was removed is overwritten in the file, and the log beside it is emptied. What is damaged is never
returned. Turns and items are numbered in the order in which they came, so numbers are the order of a conversation.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.router.http.stored.file import open_in_folder, open_in_memory
from baton.router.http.stored.records import Item, ItemRow, Listed, NamedConversation, Page, Turn, Unfit, digest_of

MAX_ROWS = 2**16
"""Turns, and conversations."""
_ROW_BYTES = 256
"""Of a conversation without its metadata, about. It tells who has most where many are empty."""
_ANONYMOUS = (None, 0, b"", b"")
_OLDEST = (
    "SELECT number FROM conversation WHERE number != :kept AND owner = (SELECT owner FROM conversation "
    "WHERE number != :kept GROUP BY owner ORDER BY sum(num_bytes) DESC LIMIT 1) ORDER BY used_at LIMIT 1"
)


class Database:
    """Conversations of at most `max_bytes`, each for `keep_s` seconds after something was added to it. `folder`: None
    keeps them in memory. Methods may raise `sqlite3.Error`; those that change rows belong into a `transaction`."""

    def __init__(
        self, folder: Path | None, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since 1970, since only they are the same in the next life. Raises `InvalidSetting`."""
        self.num_evicted = 0
        """Turns that gave way to others."""
        self.link = open_in_memory() if folder is None else open_in_folder(folder)
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._has_leftovers = True  # of an earlier life that was killed
        self._is_file = folder is not None

    @contextlib.contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All of the block, or nothing. `kind`: DEFERRED for one that only reads."""
        num_evicted = self.num_evicted
        self.link.execute(f"BEGIN {kind}")
        try:
            yield
            self.link.execute("COMMIT")
        except BaseException:
            self.num_evicted = num_evicted
            if self.link.in_transaction:
                self.link.execute("ROLLBACK")
            raise

    @property
    def now_s(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    @property
    def oldest_s(self) -> float:
        """What was used before is there no more."""
        return self._clock() - self._keep_s

    def begin(self, owner: str, named: NamedConversation | None = None) -> int:
        """The number of a new conversation."""
        members: tuple[Any, ...] = _ANONYMOUS
        if named is not None:
            members = (named.conversation_id, named.created_at, named.metadata, named.digest(owner))
        query = "INSERT INTO conversation VALUES (NULL, ?, ?, ?, ?, ?, 0, ?, ?)"
        begun = self.link.execute(query, (owner, *members, self._clock(), _ROW_BYTES + len(members[2])))
        number = begun.lastrowid or 0
        self._make_room(number)
        return number

    def add(self, owner: str, conversation: int, turn: Turn) -> None:
        """Add a turn to a conversation. Raises `Unfit` when there is no room for it."""
        if turn.num_bytes > self._max_bytes:
            raise Unfit("there is no room for its conversation")
        previous = turn.follows if isinstance(turn.follows, str) else None
        row = (owner, turn.response_id, previous, conversation, turn.response, _digest(owner, turn, previous))
        number = self.link.execute("INSERT INTO turn VALUES (NULL, ?, ?, ?, ?, ?, ?)", row).lastrowid or 0
        rows = [(number, each.is_output, each.item_id, each.digest(owner, number), each.content) for each in turn.items]
        self.link.executemany("INSERT INTO item VALUES (NULL, ?, ?, ?, ?, ?)", rows)
        self._count(conversation, turn.num_bytes)
        self.link.execute("UPDATE conversation SET used_at = ? WHERE number = ?", (self._clock(), conversation))
        self._make_room(conversation)

    def change_metadata(self, owner: str, conversation: int, named: NamedConversation) -> None:
        """Replace the metadata. Raises `Unfit` when there is no room for it."""
        update = (
            "UPDATE conversation SET num_bytes = num_bytes - length(metadata) + :new_bytes, metadata = :metadata, "
            "digest = :digest, used_at = :now_s WHERE number = :number"
        )
        values = {"new_bytes": len(named.metadata), "metadata": named.metadata, "digest": named.digest(owner)}
        self.link.execute(update, {**values, "now_s": self._clock(), "number": conversation})
        self._make_room(conversation)

    def rows(self, turns: Iterable[int], without_output_of: int = 0) -> list[ItemRow]:
        """The items of turns, which are in order. Of one turn those of the output may be left out."""
        query = "SELECT number, turn, id, length(content) FROM item WHERE turn = ? AND (turn != ? OR NOT is_output)"
        found: list[ItemRow] = []
        for turn in turns:
            rows = self.link.execute(f"{query} ORDER BY number", (turn, without_output_of))
            found += (ItemRow(*row) for row in rows)
        return found

    def items(self, owner: str, rows: Iterable[ItemRow]) -> list[Item]:
        """The items in these rows. Raises `sqlite3.DatabaseError` for one that is damaged."""
        return [self._item(owner, row) for row in rows]

    def listed(self, owner: str, rows: Sequence[ItemRow], page: Page) -> Listed:
        """One page of these rows: only its items are read. Raises `NoSuchItem`."""
        found, has_more = page.cut(rows)
        return Listed(self.items(owner, found), has_more)

    def turn(self, owner: str, number: int) -> Turn:
        """A turn with all its items."""
        query = "SELECT id, previous, response, digest FROM turn WHERE number = ?"
        response_id, previous, response, digest = self.link.execute(query, (number,)).fetchone()
        turn = Turn(response_id, previous, tuple(self.items(owner, self.rows([number]))), response)
        if _digest(owner, turn, previous) != digest:
            raise damaged()
        return turn

    def remove_turn(self, number: int) -> None:
        """Remove a turn with its items, and its conversation where that has neither a name nor another turn."""
        query = "SELECT conversation, length(response) FROM turn WHERE number = ?"
        conversation, num_bytes = self.link.execute(query, (number,)).fetchone()
        num_bytes += sum(row.num_bytes for row in self.rows([number]))
        self.link.execute("DELETE FROM item WHERE turn = ?", (number,))
        self.link.execute("DELETE FROM turn WHERE number = ?", (number,))
        self._count(conversation, -num_bytes)
        turns = "SELECT 1 FROM turn WHERE conversation = conversation.number"
        query = f"DELETE FROM conversation WHERE number = ? AND id IS NULL AND NOT EXISTS ({turns})"
        self.link.execute(query, (conversation,))
        self._has_leftovers = True

    def remove_item(self, row: ItemRow) -> None:
        """Remove one item, and its turn where that was nothing else."""
        query = "SELECT conversation, id FROM turn WHERE number = ?"
        conversation, response_id = self.link.execute(query, (row.turn,)).fetchone()
        self.link.execute("DELETE FROM item WHERE number = ?", (row.number,))
        self._count(conversation, -row.num_bytes)
        self._has_leftovers = True
        if response_id is None and not self.rows([row.turn]):
            self.remove_turn(row.turn)

    def forget(self, conversation: int) -> int:
        """Remove a conversation; the number of its turns."""
        self._has_leftovers = True
        turns = "SELECT number FROM turn WHERE conversation = ?"
        self.link.execute(f"DELETE FROM item WHERE turn IN ({turns})", (conversation,))
        self.link.execute("DELETE FROM conversation WHERE number = ?", (conversation,))
        return self.link.execute("DELETE FROM turn WHERE conversation = ?", (conversation,)).rowcount

    def expire(self) -> None:
        """Remove what is too old, and what may be left of all that was removed."""
        with self.transaction():
            self._remove_expired(0)
        self.clean()

    def clean(self) -> None:
        """Empty the log of the file, which may hold what was removed. Where another router is reading, that is left to
        the next call."""
        if self._has_leftovers and self._is_file:
            (is_busy, *_) = self.link.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._has_leftovers = bool(is_busy)

    @property
    def num_responses(self) -> int:
        """How many are stored, of all routers together."""
        return self._number("SELECT count(id) FROM turn")

    @property
    def num_bytes(self) -> int:
        """Bytes that are used, of the file or in memory."""
        used = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return used * self._number("PRAGMA page_size")

    def close(self) -> None:
        """Close the file."""
        self.link.close()

    def _count(self, conversation: int, num_bytes: int) -> None:
        """The items of a conversation are others now, with so many bytes more."""
        update = "UPDATE conversation SET num_bytes = num_bytes + ?, version = version + 1 WHERE number = ?"
        self.link.execute(update, (num_bytes, conversation))

    def _make_room(self, kept: int) -> None:
        """Forget conversations until the bounds are kept, but for the one with the number `kept`."""
        self._remove_expired(kept)
        while self._is_too_much():
            oldest = self.link.execute(_OLDEST, {"kept": kept}).fetchone()
            if oldest is None:
                raise Unfit("there is no room for its conversation")
            self.num_evicted += self.forget(oldest[0])

    def _is_too_much(self) -> bool:
        numbers = (self._number(f"SELECT count(*) FROM {table}") for table in ("turn", "conversation"))
        return self.num_bytes > self._max_bytes or max(numbers) > MAX_ROWS

    def _remove_expired(self, kept: int) -> None:
        query = "SELECT number FROM conversation WHERE used_at < ? AND number != ?"
        for (number,) in self.link.execute(query, (self.oldest_s, kept)).fetchall():
            self.forget(number)

    def _item(self, owner: str, row: ItemRow) -> Item:
        query = "SELECT id, content, is_output, digest FROM item WHERE number = ?"
        item_id, content, is_output, digest = self.link.execute(query, (row.number,)).fetchone()
        item = Item(item_id, content, bool(is_output))
        if item.digest(owner, row.turn) != digest:
            raise damaged()
        return item

    def _number(self, query: str) -> int:
        return int(self.link.execute(query).fetchone()[0])


def _digest(owner: str, turn: Turn, previous: str | None) -> bytes:
    names = (owner.encode(), (turn.response_id or "").encode(), (previous or "").encode())
    return digest_of(*names, turn.response)


def damaged() -> sqlite3.DatabaseError:
    """The error about a row whose digest is not its own."""
    return sqlite3.DatabaseError("a stored response is damaged")
