"""JSON text in pieces of bounded size, so that a large answer never exists as a whole and never costs much at once.

Owns the order in which a payload is encoded. Does not know what the payload means, nor sockets. The pieces joined are
the compact JSON text of the payload; making one piece costs about as much as encoding `PIECE_CHARS` characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

PIECE_CHARS = 2**14
_ITEMS_AT_ONCE = 256


class Items:
    """A JSON array whose items are made while it is encoded. It can be encoded once."""

    def __init__(self, items: Iterable[object]) -> None:
        self.items = items


def json_pieces(payload: dict[str, Any]) -> Iterator[bytes]:
    """`payload` as compact JSON in UTF-8, in pieces. A lone surrogate is written as a question mark."""
    collected: list[str] = []
    num_chars = 0
    for text in _texts(payload):
        collected.append(text)
        num_chars += len(text)
        if num_chars >= PIECE_CHARS:
            yield "".join(collected).encode("utf-8", "replace")
            collected, num_chars = [], 0
    if collected:
        yield "".join(collected).encode("utf-8", "replace")


def dumps(value: object) -> str:
    """`value` as compact JSON text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Items):
        yield from _array(map(dumps, value.items))
    elif not _is_large(value):
        yield dumps(value)
    elif isinstance(value, dict):
        opening = "{"
        for name, member in value.items():
            yield f"{opening}{dumps(name)}:"
            yield from _texts(member)
            opening = ","
        yield "}"
    elif isinstance(value, list) and len(value) > _ITEMS_AT_ONCE:
        batches = (value[start : start + _ITEMS_AT_ONCE] for start in range(0, len(value), _ITEMS_AT_ONCE))
        yield from _array(dumps(batch)[1:-1] for batch in batches)
    elif isinstance(value, list):
        opening = "["
        for item in value:
            yield opening
            yield from _texts(item)
            opening = ","
        yield "]"


def _is_large(value: object) -> bool:
    """Whether `value` has to be taken apart: it holds `Items`, or a list with many items."""
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return len(value) > _ITEMS_AT_ONCE or any(_is_large(item) for item in value if isinstance(item, dict))
    return isinstance(value, Items)


def _array(texts: Iterable[str]) -> Iterator[str]:
    opening = "["
    for text in texts:
        yield opening + text
        opening = ","
    yield "]" if opening == "," else "[]"
