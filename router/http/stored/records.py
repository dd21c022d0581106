"""What is stored, as the database and its callers hand it to each other. Pure data; knows no SQL and no HTTP.

A turn is a response with the items that only it has, or items alone that somebody added to a conversation. Its items
are in order: those of its input, then those of its output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_PAGE_BYTES = 16 * 2**20
"""Of the items of one page: what two bodies may hold."""


class Unfit(Exception):
    """Something cannot be stored, or not be read as it was asked for; the message says why."""


class NoSuchItem(Unfit):
    """A list was to go on after an item that is none of its own."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item; `content` is all of it as JSON."""

    item_id: str
    content: bytes
    is_output: bool = False

    def digest(self, owner: str, turn: int) -> bytes:
        """What tells a damaged row, and one that is another's."""
        return digest_of(owner.encode(), b"%d %d" % (turn, self.is_output), self.item_id.encode(), self.content)


class Version(NamedTuple):
    """A conversation of `/v1/conversations` as it was read. Each change of its items counts `number` up."""

    conversation_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """`response`: as JSON, without its output. `follows`: the response before it, or the conversation it belongs to.
    Items alone have neither an id nor a response."""

    response_id: str | None
    follows: str | Version | None
    items: tuple[Item, ...]
    response: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes of its content."""
        return len(self.response) + sum(len(item.content) for item in self.items)


@dataclass(frozen=True, slots=True)
class NamedConversation:
    """What `/v1/conversations` tells of a conversation beside its items. `metadata`: as JSON."""

    conversation_id: str
    created_at: int
    metadata: bytes

    def digest(self, owner: str) -> bytes:
        """What tells a damaged row."""
        return digest_of(owner.encode(), self.conversation_id.encode(), b"%d" % self.created_at, self.metadata)


class ItemRow(NamedTuple):
    """Where an item is, without its content."""

    number: int
    turn: int
    item_id: str
    num_bytes: int


class Listed(NamedTuple):
    """One page of a list: items as JSON."""

    items: Sequence[Item]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that is asked for: at most `limit` items `after` one of them."""

    limit: int
    is_descending: bool = False
    after: str | None = None

    def cut(self, rows: Sequence[ItemRow]) -> tuple[Sequence[ItemRow], bool]:
        """Those of `rows` that the page has, one at least, and whether more follow. Raises `NoSuchItem`."""
        ordered = rows[::-1] if self.is_descending else rows
        begin = 0 if self.after is None else self._index_after(ordered)
        end, num_bytes = begin, 0
        for row in ordered[begin : begin + self.limit]:
            num_bytes += row.num_bytes
            if num_bytes > MAX_PAGE_BYTES and end > begin:
                break
            end += 1
        return ordered[begin:end], end < len(ordered)

    def _index_after(self, rows: Sequence[ItemRow]) -> int:
        for index, row in enumerate(rows):
            if row.item_id == self.after:
                return index + 1
        raise NoSuchItem("after is no item of this list")


def digest_of(*parts: bytes) -> bytes:
    """A digest of the parts, which nothing else has."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest()
