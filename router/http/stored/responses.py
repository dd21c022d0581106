"""Stored responses by their ids: what one is, what it follows, and the list of its input.

Responses that follow each other are a chain; several may follow the same one. One that belongs to a conversation of
`/v1/conversations` follows all that this had before. Invariants: a response is found by its id together with its
owner; a chain of which a part is gone is not continued.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.http.stored.database import Database
from baton.router.http.stored.records import Item, ItemRow, Listed, Page, Turn, Unfit, Version

MAX_TURNS = 1024
"""Of a chain that is read. A turn has two items at least, and a request may have twice as many."""
TOO_LONG = "the conversation is too long: send what matters of it as input"
_FIND = (
    "SELECT turn.number, turn.previous, conversation.number, conversation.id FROM turn JOIN conversation "
    "ON conversation.number = turn.conversation WHERE turn.owner = ? AND turn.id = ? AND used_at >= ?"
)


class Responses:
    """The responses in a database. Methods may raise `sqlite3.Error`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, owner: str, turn: Turn) -> None:
        """Store a response, unless it is stored already. Raises `Unfit` when what it follows is gone or has changed,
        and when there is no room for it."""
        with self._database.transaction():
            known = "SELECT 1 FROM turn WHERE owner = ? AND id = ?"
            if not self._database.link.execute(known, (owner, turn.response_id)).fetchone():
                self._database.add(owner, self._conversation(owner, turn.follows), turn)

    def get(self, owner: str, response_id: str) -> Turn | None:
        """The response, None when there is none."""
        with self._database.transaction("DEFERRED"):
            row = self._find(owner, response_id, self._database.oldest_s)
            return None if row is None else self._database.turn(owner, row[0])

    def until(self, owner: str, response_id: str, max_bytes: int) -> Sequence[Item] | None:
        """All items of the response and of those that it follows, None when one of them is gone. Raises `Unfit` for
        more than `max_bytes`, and for a response of a conversation of `/v1/conversations`."""
        with self._database.transaction("DEFERRED"):
            row = self._find(owner, response_id, self._database.oldest_s)
            if row is not None and row[3] is not None:
                raise Unfit("the response belongs to a conversation: send the id of that as conversation")
            turns, is_whole = self._chain(owner, response_id)
            if not turns or not is_whole:
                return None
            return read_all(self._database, owner, self._database.rows(turns), max_bytes)

    def listed_input(self, owner: str, response_id: str, page: Page) -> Listed | None:
        """A page of what a response was the answer to, None when there is no such response. Where one that it follows
        is gone, the list begins behind that. Raises `NoSuchItem`."""
        with self._database.transaction("DEFERRED"):
            row = self._find(owner, response_id, self._database.oldest_s)
            if row is None:
                return None
            return self._database.listed(owner, self._input_rows(owner, response_id, row), page)

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response with its items; whether there was one. Those that follow it stay, without it."""
        with self._database.transaction():
            row = self._find(owner, response_id, 0.0)
            if row is None:
                return False
            self._database.remove_turn(row[0])
        self._database.clean()
        return True

    def _input_rows(self, owner: str, response_id: str, row: tuple[int, str | None, int, str | None]) -> list[ItemRow]:
        number, _, conversation, name = row
        if name is None:
            return self._database.rows(self._chain(owner, response_id)[0], without_output_of=number)
        return self._database.rows(turns_of(self._database, conversation, number), without_output_of=number)

    def _conversation(self, owner: str, follows: str | Version | None) -> int:
        """The number of the conversation that a response belongs to, or begins."""
        if follows is None:
            return self._database.begin(owner)
        if isinstance(follows, str):
            row = self._find(owner, follows, 0.0)
            if row is None:
                raise Unfit("the response that it follows is gone")
            return row[2]
        query = "SELECT number FROM conversation WHERE owner = ? AND id = ? AND version = ?"
        found = self._database.link.execute(query, (owner, *follows)).fetchone()
        if found is None:
            raise Unfit("its conversation has changed meanwhile, or is gone")
        return int(found[0])

    def _chain(self, owner: str, response_id: str) -> tuple[list[int], bool]:
        """The turns up to this one, the first one first, and whether none between is gone. Raises `Unfit` for more
        than `MAX_TURNS`."""
        turns: list[int] = []
        next_id: str | None = response_id
        while next_id is not None:
            row = self._find(owner, next_id, self._database.oldest_s)
            if row is None:
                break
            turns.append(row[0])
            if len(turns) > MAX_TURNS:
                raise Unfit(TOO_LONG)
            next_id = row[1]
        return turns[::-1], next_id is None

    def _find(self, owner: str, response_id: str, since_s: float) -> tuple[int, str | None, int, str | None] | None:
        """The numbers of a turn and of its conversation, the turn that it follows, and the conversation's name."""
        row: tuple[int, str | None, int, str | None] | None
        row = self._database.link.execute(_FIND, (owner, response_id, since_s)).fetchone()
        return row


def turns_of(database: Database, conversation: int, up_to: int = 2**62) -> list[int]:
    """The turns of a conversation of `/v1/conversations`, in order, up to the one with the number `up_to`."""
    query = "SELECT number FROM turn WHERE conversation = ? AND number <= ? ORDER BY number"
    return [number for (number,) in database.link.execute(query, (conversation, up_to))]


def read_all(database: Database, owner: str, rows: Sequence[ItemRow], max_bytes: int) -> list[Item]:
    """The items in these rows. Raises `Unfit` for more than `max_bytes`."""
    if sum(row.num_bytes for row in rows) > max_bytes:
        raise Unfit(TOO_LONG)
    return database.items(owner, rows)
