"""What is written down of one stream, as bytes: its head, then what came from the nodes, in the order it was taken,
and figures of its choices.

Owns the format. Each record is its length and checksum, and msgpack. A process may die in the middle of a record, so
whatever follows the last whole one is no part of a journal; nothing of it has reached the client.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import xxhash

from baton.router.requests.output import Delivery
from baton.wire.messages.output import HandoffFigures

_PREFIX = struct.Struct("<IQ")
_Records = list[tuple[int, Delivery]]


@dataclass(frozen=True, slots=True)
class StreamHead:
    """What began a stream: whose it is (the name of an API key, "" without keys), the path and body of the request, and
    what the router chose for it. `prompt_digest`: see `digest_of`."""

    stream_id: str
    owner: str
    path: str
    content_type: str
    body: bytes = field(repr=False)
    created: int
    seed: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class ToldFigures:
    """The measurements of one choice that a client is told, as far as they are known: see `FlightFigures`. `ended_at`
    is in seconds since 1970, 0 while the choice runs."""

    index: int
    num_cached_tokens: int
    cached_by_role: dict[str, int]
    handoff: HandoffFigures | None
    ended_at: int = 0
    cached_by_place: dict[str, int] = field(default_factory=dict)


# made here, on one thread: msgspec 0.22 crashes when two threads are the first to decode the same type of dataclass
_HEAD, _RECORD = msgspec.msgpack.Decoder(StreamHead), msgspec.msgpack.Decoder(_Records | ToldFigures)


class Past(NamedTuple):
    """What a journal has of a stream: all deliveries, in order, and the last figures of each choice by its index."""

    deliveries: _Records
    figures: dict[int, ToldFigures]


def digest_of(prompts: Sequence[Sequence[int]]) -> bytes:
    """128 bits over the tokens of all prompts of a request."""
    return blake2b(msgspec.msgpack.encode([list(prompt) for prompt in prompts]), digest_size=16).digest()


def pack(record: StreamHead | ToldFigures | Sequence[tuple[int, Delivery]]) -> bytes:
    """One record: the head, figures, or deliveries with the index of their choice."""
    content = msgspec.msgpack.encode(record)
    return _PREFIX.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content


def unpack_head(data: bytes) -> StreamHead:
    """The head of a journal. Raises `ValueError` when it is damaged."""
    contents = _contents(data, most=1)
    if not contents:
        raise ValueError("the journal has no head")
    return _HEAD.decode(contents[0])


def unpack_past(data: bytes) -> Past:
    """All that came for a stream. Raises `ValueError` when its journal is damaged."""
    past = Past([], {})
    for content in _contents(data)[1:]:
        record = _RECORD.decode(content)
        if isinstance(record, ToldFigures):
            past.figures[record.index] = record
        else:
            past.deliveries.extend(record)
    return past


def _contents(data: bytes, most: int | None = None) -> list[Any]:
    contents: list[bytes] = []
    place = 0
    while len(data) - place >= _PREFIX.size and len(contents) != most:
        length, checksum = _PREFIX.unpack_from(data, place)
        place += _PREFIX.size
        content = data[place : place + length]
        if len(content) < length or xxhash.xxh3_64_intdigest(content) != checksum:
            break
        contents.append(content)
        place += length
    return contents
