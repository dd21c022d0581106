"""Mutated messages of the KV transfer: control messages, data headers, and what agents tell each other.

What must hold for any bytes: `decode` returns a message that was sent (or, where the envelope's checksum was repaired
after the mutation, one that is valid by its own annotations), or raises `InvalidMessage` or `Refused`. Never anything
else. `BATON_FUZZ_MESSAGES` sets how many messages are tried, 12,000 unless told; `BATON_FUZZ_SEED` where they start:

    BATON_FUZZ_MESSAGES=10000000 BATON_FUZZ_SEED=7 python -m pytest tests/kvtransfer/test_wire_fuzz.py
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import struct
import typing
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
import xxhash

from baton.kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER
from baton.kvtransfer.transports.nccl import wire as nccl_wire
from baton.kvtransfer.transports.nixl import wire as nixl_wire
from baton.kvtransfer.transports.shm import slots_wire
from baton.kvtransfer.transports.tcp_zmq import BlockBatch
from baton.wire.codec import PROTOCOL_VERSION, Bounds, Codec, Length, Packed
from baton.wire.errors import InvalidMessage, Refused
from baton.wire.layout import DTYPE_BYTES, KvLayout, LayerKv

_NUM_MESSAGES = int(os.environ.get("BATON_FUZZ_MESSAGES", "12000"))
_SEED = int(os.environ.get("BATON_FUZZ_SEED", "1"))
_NUM_SAMPLES = 6
_HEADER = struct.Struct("<2sHIQ")
_MAX_STRING, _MAX_BYTES, _MAX_ITEMS = 4096, 64 * 1024, 65_536
_RANGES = {"I": (0, 2**32 - 1), "Q": (0, 2**64 - 1)}


def _codecs() -> dict[str, Codec]:
    """Everything that this package decodes, by name."""
    found = {"D to P": RECEIVER_TO_SENDER, "P to D": SENDER_TO_RECEIVER, "zmq header": Codec(BlockBatch)}
    for wire in (nccl_wire, nixl_wire, slots_wire):
        codecs = {key: value for key, value in vars(wire).items() if isinstance(value, Codec)}
        found |= {f"{wire.__name__.removeprefix('kvtransfer.transports.')} {key}": each for key, each in codecs.items()}
    return found


CODECS = _codecs()


class Forge:
    """Valid messages of one vocabulary, and what becomes of them."""

    def __init__(self, codec: Codec, chance: random.Random) -> None:
        self.codec = codec
        self._chance = chance
        kinds = list(codec.message_types)
        self.sent = [made(kind, chance) for kind in kinds for _ in range(_NUM_SAMPLES)]
        self._frames = [codec.encode(message) for message in self.sent]

    def damaged(self) -> bytes:
        """A frame as the wire may have left it."""
        return self._damaged(self._chance.choice(self._frames))

    def forged(self) -> bytes:
        """A damaged or rebuilt body in an envelope that says it is right."""
        body = self._chance.choice(self._frames)[_HEADER.size :]
        if self._chance.random() < 0.4:
            return sealed(self._damaged(body))
        fields = msgpack.unpackb(body)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            fields = self._rebuilt(fields)
        return sealed(msgpack.packb(fields))

    def _damaged(self, data: bytes) -> bytes:
        chance, changed = self._chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4))):
            place = chance.randrange(len(changed) + 1)
            match chance.randrange(7):
                case 0 | 1 if place < len(changed):
                    changed[place] ^= 1 << chance.randrange(8)
                case 2 if place < len(changed):
                    changed[place] = chance.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xDC, 0xDD, 0xDF, 0xFF))
                case 3:
                    del changed[place : place + chance.randrange(1, 9)]
                case 4:
                    changed[place:place] = chance.randbytes(chance.randrange(1, 9))
                case 5:
                    del changed[place:]
                case _:
                    other = chance.choice(self._frames)
                    changed[place:] = other[chance.randrange(len(other)) :]
        return bytes(changed)

    def _rebuilt(self, value: Any) -> Any:
        """The same with one thing in it replaced, left out, doubled, or taken from another message."""
        chance = self._chance
        if isinstance(value, dict) and value and chance.random() < 0.9:
            key = chance.choice(list(value))
            match chance.randrange(10):
                case 0:
                    return {name: item for name, item in value.items() if name != key}
                case 1:
                    return {**value, chance.choice(("more", "t", "", "handoff")): odd(chance)}
                case 2:
                    other = msgpack.unpackb(chance.choice(self._frames)[_HEADER.size :])
                    return {**value, key: chance.choice(list(other.values()))}
                case _:
                    return {**value, key: self._rebuilt(value[key])}
        if isinstance(value, list) and value and chance.random() < 0.7:
            place = chance.randrange(len(value))
            if chance.random() < 0.3:
                return value * chance.choice((0, 2, 9))
            return [*value[:place], self._rebuilt(value[place]), *value[place + 1 :]]
        if isinstance(value, bytes) and chance.random() < 0.5:
            return self._damaged(value)[: chance.choice((2**20, len(value)))]
        return odd(chance)


def odd(chance: random.Random) -> Any:
    """A value that few fields allow."""
    return chance.choice(
        (
            *(None, True, False, 0, 1, -1, 1000, 1001, 2**31, 2**32, 2**40, 2**40 + 1, 2**63 - 1, 2**63, 2**64 - 1),
            *(-(2**63), 0.0, -0.5, 1e300, math.nan, math.inf, "", "x", "x" * 257, "x" * 1025, "\ud7ff" * 5000),
            *(b"", b"h" * 16, b"h" * 17, bytes(2**16 + 1), bytes(7), [], [0], [[]], [None] * 20, {}, {"": 0}),
            *(msgpack.ExtType(1, b""), msgpack.Timestamp(0), {"t": "Renew"}, [{}] * 70_000),
        )
    )


def sealed(body: bytes) -> bytes:
    """A correct envelope around any body."""
    return _HEADER.pack(b"BT", PROTOCOL_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def parts(hint: Any) -> tuple[Any, Any, bool]:
    """(type, constraint, whether None is allowed) of a field."""
    constraint = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        constraint = next((extra for extra in extras if isinstance(extra, Bounds | Length | Packed)), None)
    members = get_args(hint)
    if type(None) in members:
        inner, inner_constraint, _ = parts(next(member for member in members if member is not type(None)))
        return inner, inner_constraint, True
    return hint, constraint, False


def made(hint: Any, chance: random.Random) -> Any:
    """A value that a field of this type may have, often one at its limits."""
    kind, constraint, is_optional = parts(hint)
    if is_optional and chance.random() < 0.3:
        return None
    if kind is KvLayout:
        num_heads, head_dim, window, block_size = (chance.randrange(1, 2**20) for _ in range(4))
        layers = [LayerKv(num_heads, head_dim), LayerKv(num_heads, head_dim, window)] * chance.randrange(1, 9)
        return KvLayout.of_layers(chance.choice(sorted(DTYPE_BYTES)), block_size, layers)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        record = typing.cast(Any, kind)
        return record(**{field.name: made(hints[field.name], chance) for field in dataclasses.fields(kind)})
    if isinstance(constraint, Packed):
        low, high = _RANGES.get(constraint.typecode, (0, 9))
        as_number = float if constraint.typecode in "fd" else int
        return tuple(as_number(chance.choice((low, high, 5))) for _ in range(chance.randrange(6)))
    if get_origin(kind) is tuple:
        longest = min(constraint.max_length if constraint else 4, 4)
        return tuple(made(get_args(kind)[0], chance) for _ in range(chance.randrange(longest + 1)))
    bounds = constraint if isinstance(constraint, Bounds) else Bounds(0, 2**63 - 1)
    length = chance.choice((0, 1, constraint.max_length if isinstance(constraint, Length) else 40))
    if kind is float:
        return float(chance.choice((max(bounds.low, -1e300), min(bounds.high, 1e300))))
    scalars: dict[Any, Any] = {
        bool: chance.random() < 0.5,
        int: chance.choice((int(bounds.low), int(bounds.high), int(min(bounds.low + 7, bounds.high)))),
        str: "ß" * min(length, 60),
        bytes: chance.randbytes(min(length, 60)),
    }
    return scalars[kind]


def is_valid(value: Any, hint: Any) -> bool:
    """Whether a value is what its annotation allows."""
    kind, constraint, is_optional = parts(hint)
    if value is None:
        return is_optional
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return type(value) is kind and all(is_valid(getattr(value, name), hints[name]) for name in hints)
    if isinstance(constraint, Packed):
        low, high = _RANGES.get(constraint.typecode, (-math.inf, math.inf))
        is_in_range = all(math.isfinite(item) and low <= item <= high for item in value)
        return type(value) is tuple and len(value) <= constraint.max_items and is_in_range
    if get_origin(kind) is tuple:
        longest = constraint.max_length if isinstance(constraint, Length) else _MAX_ITEMS
        return type(value) is tuple and len(value) <= longest and all(is_valid(v, get_args(kind)[0]) for v in value)
    if type(value) is not kind:
        return False
    if kind in (int, float):
        default = Bounds(0, 2**63 - 1) if kind is int else Bounds(-math.inf, math.inf)
        bounds = constraint or default
        return math.isfinite(value) and bounds.low <= value <= bounds.high
    longest = {str: _MAX_STRING, bytes: _MAX_BYTES, bool: 0}[kind]
    return kind is bool or len(value) <= (constraint.max_length if constraint else longest)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_the_wire_damaged_is_never_taken_for_another_message(codec: Codec) -> None:
    forge = Forge(codec, random.Random(_SEED))
    for _ in range(_NUM_MESSAGES // len(CODECS) // 2):
        frame = forge.damaged()
        try:
            found = codec.decode(frame)
        except (InvalidMessage, Refused):
            continue
        assert found in forge.sent, frame.hex()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_somebody_forged_is_valid_by_its_own_bounds_or_refused(codec: Codec) -> None:
    forge = Forge(codec, random.Random(_SEED + 1))
    num_valid = num_refused = 0
    for _ in range(_NUM_MESSAGES // len(CODECS) // 2):
        frame = forge.forged()
        try:
            found = codec.decode(frame)
        except InvalidMessage:
            num_refused += 1
            continue
        num_valid += 1
        assert is_valid(found, type(found)), frame.hex()
        assert codec.decode(codec.encode(found)) == found, frame.hex()
    # both ways were really gone
    assert num_valid > 0
    assert num_refused > num_valid


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_was_sent_arrives(codec: Codec) -> None:
    forge = Forge(codec, random.Random(_SEED + 2))
    for message in forge.sent:
        assert is_valid(message, type(message))
        assert codec.decode(codec.encode(message)) == message
