"""Turns as tests store them, and a clock that they set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.router.http.stored.database import Database
from baton.router.http.stored.records import Item, Turn, Version
from baton.router.http.stored.responses import Responses

MAX_BYTES, KEEP_S = 4 * 2**20, 100.0
SECRET = b"the cat is called Minka"


@dataclass(slots=True)
class Clock:
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


def item(name: str, num_bytes: int = 0, is_output: bool = False) -> Item:
    return Item(name, b"[%s]" % name.encode() + bytes(num_bytes), is_output)


def turn(name: str, follows: str | Version | None = None, num_bytes: int = 100) -> Turn:
    """A response with one item of input, `name?`, and one of output, `name!`."""
    items = (item(f"{name}?"), item(f"{name}!", num_bytes, is_output=True))
    return Turn(name, follows, items, b"{%s}" % name.encode())


def put(database: Database, owner: str, *turns: Turn) -> None:
    for each in turns:
        Responses(database).put(owner, each)


def is_stored(database: Database, owner: str, name: str) -> bool:
    return Responses(database).get(owner, name) is not None


def names(items: Iterable[Item] | None) -> list[str] | None:
    return None if items is None else [each.item_id for each in items]


def read_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())
