"""Conversations of `/v1/conversations`: those that have a name and go on when nobody asks for a response.

Their items come with responses or alone, and each of them can be removed. Invariant: a conversation is found by its id
together with its owner. A response is added only to the conversation as its prompt was made of it (`Version`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.router.http.stored.database import Database, damaged
from baton.router.http.stored.records import Item, ItemRow, Listed, NamedConversation, Page, Turn, Unfit, Version
from baton.router.http.stored.responses import read_all, turns_of

MAX_ITEMS = 2048
"""Of a conversation to which items are added. A request may have as many."""
_FIND = "SELECT number, version FROM conversation WHERE owner = ? AND id = ? AND used_at >= ?"


class Read(NamedTuple):
    """A conversation, read for a response that continues it."""

    version: Version
    items: Sequence[Item]


class WithoutItem(NamedTuple):
    """A conversation of which an item was removed. `response_id`: of the response that the item belonged to."""

    named: NamedConversation
    response_id: str | None


class Conversations:
    """The named conversations in a database. `None`: there is no such conversation, or no such item. Methods may raise
    `sqlite3.Error`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, owner: str, conversation_id: str, metadata: bytes, items: Sequence[Item]) -> NamedConversation:
        """Make a conversation that begins with these items. Raises `Unfit` when there is no room for it."""
        named = NamedConversation(conversation_id, int(self._database.now_s), metadata)
        with self._database.transaction():
            number = self._database.begin(owner, named)
            if items:
                self._database.add(owner, number, Turn(None, None, tuple(items)))
        return named

    def get(self, owner: str, conversation_id: str) -> NamedConversation | None:
        """What is told of a conversation."""
        with self._database.transaction("DEFERRED"):
            number = self._find(owner, conversation_id)
            return None if number is None else self._named(owner, number)

    def change(self, owner: str, conversation_id: str, metadata: bytes) -> NamedConversation | None:
        """Replace the metadata. Raises `Unfit` when there is no room for it."""
        with self._database.transaction():
            number = self._find(owner, conversation_id)
            if number is None:
                return None
            named = NamedConversation(conversation_id, self._named(owner, number).created_at, metadata)
            self._database.change_metadata(owner, number, named)
        return named

    def delete(self, owner: str, conversation_id: str) -> list[str] | None:
        """Remove a conversation with its items and responses. Returns the ids of these."""
        with self._database.transaction():
            number = self._find(owner, conversation_id)
            if number is None:
                return None
            query = "SELECT id FROM turn WHERE conversation = ? AND id NOTNULL"
            response_ids = [name for (name,) in self._database.link.execute(query, (number,))]
            self._database.forget(number)
        self._database.clean()
        return response_ids

    def add(self, owner: str, conversation_id: str, items: Sequence[Item]) -> bool:
        """Add items; whether there is such a conversation. Raises `Unfit` when there is no room for them."""
        with self._database.transaction():
            number = self._find(owner, conversation_id)
            if number is None:
                return False
            if len(self._rows(number)) + len(items) > MAX_ITEMS:
                raise Unfit(f"a conversation has at most {MAX_ITEMS} items")
            self._database.add(owner, number, Turn(None, None, tuple(items)))
        return True

    def read(self, owner: str, conversation_id: str, max_bytes: int, before: str = "") -> Read | None:
        """All its items, or those before the response `before` where it has that. Raises `Unfit` for more than
        `max_bytes`."""
        with self._database.transaction("DEFERRED"):
            link = self._database.link
            found = link.execute(_FIND, (owner, conversation_id, self._database.oldest_s)).fetchone()
            if found is None:
                return None
            query = "SELECT number - 1 FROM turn WHERE owner = ? AND id = ? AND conversation = ?"
            (up_to,) = link.execute(query, (owner, before, found[0])).fetchone() or (2**62,)
            rows = self._database.rows(turns_of(self._database, found[0], up_to))
            version = Version(conversation_id, found[1])
            return Read(version, read_all(self._database, owner, rows, max_bytes))

    def listed(self, owner: str, conversation_id: str, page: Page) -> Listed | None:
        """A page of its items. Raises `NoSuchItem`."""
        with self._database.transaction("DEFERRED"):
            number = self._find(owner, conversation_id)
            return None if number is None else self._database.listed(owner, self._rows(number), page)

    def item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        """One of its items."""
        with self._database.transaction("DEFERRED"):
            row = self._row(owner, conversation_id, item_id)
            return None if row is None else self._database.items(owner, [row])[0]

    def delete_item(self, owner: str, conversation_id: str, item_id: str) -> WithoutItem | None:
        """Remove one of its items, from its response too."""
        with self._database.transaction():
            number, row = self._find(owner, conversation_id), self._row(owner, conversation_id, item_id)
            if number is None or row is None:
                return None
            query = "SELECT id FROM turn WHERE number = ?"
            (response_id,) = self._database.link.execute(query, (row.turn,)).fetchone()
            self._database.remove_item(row)
            named = self._named(owner, number)
        self._database.clean()
        return WithoutItem(named, response_id)

    def _find(self, owner: str, conversation_id: str) -> int | None:
        row = self._database.link.execute(_FIND, (owner, conversation_id, self._database.oldest_s)).fetchone()
        return None if row is None else int(row[0])

    def _rows(self, number: int) -> list[ItemRow]:
        return self._database.rows(turns_of(self._database, number))

    def _row(self, owner: str, conversation_id: str, item_id: str) -> ItemRow | None:
        number = self._find(owner, conversation_id)
        rows = [] if number is None else self._rows(number)
        return next((row for row in rows if row.item_id == item_id), None)

    def _named(self, owner: str, number: int) -> NamedConversation:
        query = "SELECT id, created_at, metadata, digest FROM conversation WHERE number = ?"
        conversation_id, created_at, metadata, digest = self._database.link.execute(query, (number,)).fetchone()
        named = NamedConversation(conversation_id, created_at, metadata)
        if named.digest(owner) != digest:
            raise damaged()
        return named
