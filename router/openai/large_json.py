"""Large answers as JSON, made on another thread in pieces of a few milliseconds.

`json.dumps` holds the interpreter until it is done, on whatever thread it runs, so an answer of megabytes would stop
every stream. Here the same text is put together from short calls, between which other threads run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from router.openai.responses import json_bytes

_ITEMS_PER_PIECE = 64


async def large_json_bytes(payload: dict[str, Any]) -> bytes:
    """`responses.json_bytes` of `payload`, which must not change meanwhile."""
    return await asyncio.to_thread(lambda: b"".join(_pieces(payload)))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for index, (name, member) in enumerate(value.items()):
            yield (b"," if index else b"{") + json_bytes(name) + b":"
            yield from _pieces(member)
        yield b"}"
    elif isinstance(value, list) and len(value) > _ITEMS_PER_PIECE:
        for first in range(0, len(value), _ITEMS_PER_PIECE):
            yield (b"," if first else b"[") + json_bytes(value[first : first + _ITEMS_PER_PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield json_bytes(value)
