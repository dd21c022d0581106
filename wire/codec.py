"""Control messages on the wire: frozen dataclasses <-> bytes, validated field by field, checksummed.

Owns the envelope and the validation of types, ranges and sizes. Does not know any message: a `Codec` is built from the
message classes that one connection may carry, so whatever is not in its vocabulary does not decode.

Envelope, little endian:  magic b"BT" | u16 protocol version | u32 body length | u64 xxh3_64 of the body | body
Body: a msgpack map {"t": tag, field: value, ...}; the tag is the class name. All fields must be present, none may be
unknown. A flipped bit fails the checksum, so a damaged message is never taken for another valid one.

Invariant: `decode` raises `InvalidMessage` and nothing else, whatever bytes it is given, and what it builds on the way
is bounded: the bytes of a frame, and at most `_MAX_VALUES` objects.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
import types
import typing
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import xxhash

from wire.errors import InvalidMessage, Refused

PROTOCOL_VERSION = 5
"""How the versions differ.

1: registration, two legs at once, grant, push, commit, release, revoke.
2: blocks are verified as they arrive (Pushed), damaged ones are sent again (Resend), the kind of checksum is agreed on,
   and what a handoff took is reported.
3: the clock of a node, and by it the times of a request's first tokens.
4: pools in device memory: dot64 checksums, `needs_fence`, the memory of a nixl pool.
5: the words of the glossary (`sampled_us`).
"""

_MAGIC = b"BT"
_HEADER = struct.Struct("<2sHIQ")
MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_STRING = 4096
_MAX_BYTES = 64 * 1024
_MAX_ITEMS = 65_536
_MAX_VALUES = 2**18
_MAX_LONG_LISTS = 32
"""Lists of more than 15 items that a body may have before it is looked at closely: their length is only announced."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Inclusive range of an int or float field."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Length:
    """Largest number of characters, bytes or items of a str, bytes or tuple field."""

    max_length: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A tuple of numbers sent as one little-endian byte string; `typecode` as in the array module."""

    typecode: str
    max_items: int


U32 = Annotated[int, Bounds(0, 2**32 - 1)]
U64 = Annotated[int, Bounds(0, 2**64 - 1)]
Id128 = Annotated[bytes, Length(16)]
TokenIds = Annotated[tuple[int, ...], Packed("I", 2**20)]
BlockIds = Annotated[tuple[int, ...], Packed("I", 2**18)]
U64s = Annotated[tuple[int, ...], Packed("Q", 2**18)]

_Coder = Callable[[Any], Any]


class Codec:
    """Encodes and decodes the messages of one vocabulary.

    Raises `TypeError` at construction for a field type it cannot validate, `InvalidMessage` from `decode`.
    """

    def __init__(self, *message_types: type[Any]) -> None:
        self._encoders: dict[type[Any], _Coder] = {}
        self._decoders: dict[str, _Coder] = {}
        for message_type in message_types:
            self._encoders[message_type] = _record_encoder(message_type)
            self._decoders[message_type.__name__] = _record_decoder(message_type)

    def encode(self, message: object) -> bytes:
        """One envelope holding `message`. Raises `InvalidMessage` when it is larger than any peer would accept."""
        encoder = self._encoders.get(type(message))
        if encoder is None:
            raise InvalidMessage(f"{type(message).__name__} does not belong on this connection")
        body: bytes = msgpack.packb({"t": type(message).__name__, **encoder(message)})
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidMessage(f"{type(message).__name__} of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
        _check_values(body)
        return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body

    def decode(self, frame: bytes) -> Any:
        """The message in `frame`. Raises `InvalidMessage`, or `Refused` when the peer speaks another version."""
        body = _open_envelope(frame)
        _check_values(body)
        try:
            fields = msgpack.unpackb(
                body,
                strict_map_key=True,
                max_str_len=_MAX_STRING,
                max_bin_len=MAX_MESSAGE_BYTES,
                max_array_len=_MAX_ITEMS,
                max_map_len=256,
                max_ext_len=0,
            )
        # msgpack raises many kinds for hostile bytes (UnicodeDecodeError, RecursionError, ...): all mean one thing
        except Exception as error:
            raise InvalidMessage(f"body is not msgpack ({type(error).__name__})") from None
        if not isinstance(fields, dict) or not isinstance(tag := fields.pop("t", None), str):
            raise InvalidMessage("body is not a map with a tag")
        decoder = self._decoders.get(tag)
        if decoder is None:
            raise InvalidMessage(f"unknown message {tag[:40]!r}")
        return decoder(fields)


def _open_envelope(frame: bytes) -> bytes:
    if len(frame) < _HEADER.size or len(frame) > _HEADER.size + MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"envelope of {len(frame)} bytes")
    magic, version, length, checksum = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise InvalidMessage("not an envelope of this protocol")
    if version != PROTOCOL_VERSION:
        raise Refused(f"protocol version {version} does not match ours, {PROTOCOL_VERSION}")
    body = frame[_HEADER.size :]
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise InvalidMessage("envelope is damaged")
    return body


def _check_values(body: bytes) -> None:
    """Refuse a body whose values would take far more memory than its bytes: empty lists are 64 times as large.

    No value is shorter than a byte, so in a small body only what is announced and not there can be harmful. The walk
    over all heads takes time for each value; it is kept for large bodies.
    """
    if len(body) > _MAX_VALUES:
        _count_values(body)
    elif body.count(b"\xdc") + body.count(b"\xdd") > _MAX_LONG_LISTS:
        _require_whole(body)


def _require_whole(body: bytes) -> None:
    """Refuse a body that announces more than it has, building nothing of it."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(body))
    unpacker.feed(body)
    try:
        unpacker.skip()
    except Exception as error:  # as many kinds as `unpackb` has
        raise InvalidMessage(f"body is not msgpack ({type(error).__name__})") from None


def _count_values(body: bytes) -> None:
    num_values = num_announced = place = 0
    while place < len(body):
        head = _HEADS[body[place]]
        length = int.from_bytes(body[place + 1 : place + 1 + head.num_length_bytes], "big")
        place += head.size + length * head.has_payload
        num_announced += head.num_children + length * head.children_per_length
        num_values += 1
        if num_values > _MAX_VALUES or num_announced > _MAX_VALUES:
            raise InvalidMessage(f"body of {len(body)} bytes has more than {_MAX_VALUES} values")


@dataclass(frozen=True, slots=True)
class _Head:
    """What the first byte of a msgpack value says: `size` bytes up to where a payload of a written length begins."""

    size: int
    num_length_bytes: int = 0
    has_payload: bool = False
    num_children: int = 0
    children_per_length: int = 0


def _msgpack_heads() -> tuple[_Head, ...]:
    """Of all 256 first bytes, see https://github.com/msgpack/msgpack/blob/master/spec.md."""
    heads = [_Head(1)] * 256
    for count in range(16):
        heads[0x80 + count] = _Head(1, num_children=2 * count)
        heads[0x90 + count] = _Head(1, num_children=count)
    for length in range(32):
        heads[0xA0 + length] = _Head(1 + length)
    for first, num_fixed, widths in ((0xC4, 1, (1, 2, 4)), (0xC7, 2, (1, 2, 4)), (0xD9, 1, (1, 2, 4))):  # bin, ext, str
        for place, width in enumerate(widths):
            heads[first + place] = _Head(num_fixed + width, width, has_payload=True)
    numbers_and_fixed_ext = {0xCA: (5, 9, 2, 3, 5, 9, 2, 3, 5, 9), 0xD4: (3, 4, 6, 10, 18)}
    for first, sizes in numbers_and_fixed_ext.items():
        heads[first : first + len(sizes)] = [_Head(size) for size in sizes]
    for first, per_length in ((0xDC, 1), (0xDE, 2)):  # array, map
        for place, width in enumerate((2, 4)):
            heads[first + place] = _Head(1 + width, width, children_per_length=per_length)
    return tuple(heads)


_HEADS = _msgpack_heads()


def _record_encoder(record: type[Any]) -> _Coder:
    coders = [(field.name, _encoder(hint)) for field, hint in _fields(record)]

    def encode(message: Any) -> dict[str, Any]:
        return {name: coder(getattr(message, name)) for name, coder in coders}

    return encode


def _record_decoder(record: type[Any]) -> _Coder:
    coders = {field.name: _decoder(f"{record.__name__}.{field.name}", hint) for field, hint in _fields(record)}

    def decode(fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.keys() != coders.keys():
            raise InvalidMessage(f"{record.__name__} has missing or unknown fields")
        values = {name: coders[name](value) for name, value in fields.items()}
        try:
            return record(**values)
        except InvalidMessage:
            raise
        except Exception as error:  # a record may validate itself; whatever it finds is this message's error
            raise InvalidMessage(f"{record.__name__}: {error}") from None

    return decode


def _fields(record: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    if not dataclasses.is_dataclass(record):
        raise TypeError(f"{record.__name__} is not a dataclass")
    hints = get_type_hints(record, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(record)]


def _split(hint: Any) -> tuple[Any, Any]:
    """(type, the constraint it is annotated with or None)."""
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        constraints = [extra for extra in extras if isinstance(extra, Bounds | Length | Packed)]
        return inner, constraints[0] if constraints else None
    return hint, None


def _optional(hint: Any) -> Any | None:
    """X of `X | None`, else None."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in get_args(hint) if member is not type(None)]
        if len(members) == 1 and len(get_args(hint)) == 2:
            return members[0]
        raise TypeError(f"unions other than 'X | None' are not part of the wire format: {hint}")
    return None


def _encoder(hint: Any) -> _Coder:
    hint, constraint = _split(hint)
    if (inner := _optional(hint)) is not None:
        coder = _encoder(inner)
        return lambda value: None if value is None else coder(value)
    if isinstance(constraint, Packed):
        return lambda values: _pack(constraint.typecode, values)
    if get_origin(hint) is tuple:
        item = _encoder(get_args(hint)[0])
        return lambda values: [item(value) for value in values]
    if dataclasses.is_dataclass(hint):
        return _record_encoder(typing.cast(type[Any], hint))
    return lambda value: value


def _decoder(path: str, hint: Any) -> _Coder:
    hint, constraint = _split(hint)
    if (inner := _optional(hint)) is not None:
        coder = _decoder(path, inner)
        return lambda value: None if value is None else coder(value)
    if isinstance(constraint, Packed):
        return _packed_decoder(path, constraint)
    if get_origin(hint) is tuple:
        return _tuple_decoder(path, get_args(hint), constraint)
    if dataclasses.is_dataclass(hint):
        return _record_decoder(typing.cast(type[Any], hint))
    return _scalar_decoder(path, hint, constraint)


def _scalar_decoder(path: str, hint: Any, constraint: Any) -> _Coder:
    scalars: Mapping[Any, Callable[[str, Any], _Coder]] = {
        bool: _bool_decoder,
        int: _int_decoder,
        float: _float_decoder,
        str: _str_decoder,
        bytes: _bytes_decoder,
    }
    if hint not in scalars:
        raise TypeError(f"{path}: {hint} is not part of the wire format")
    return scalars[hint](path, constraint)


def _bool_decoder(path: str, constraint: Any) -> _Coder:
    def decode(value: Any) -> bool:
        if type(value) is not bool:
            raise InvalidMessage(f"{path} is not a boolean")
        return value

    return decode


def _int_decoder(path: str, constraint: Any) -> _Coder:
    bounds = constraint or Bounds(0, 2**63 - 1)

    def decode(value: Any) -> int:
        if type(value) is not int or not bounds.low <= value <= bounds.high:
            raise InvalidMessage(f"{path} is not an integer in range")
        return value

    return decode


def _float_decoder(path: str, constraint: Any) -> _Coder:
    bounds = constraint or Bounds(-math.inf, math.inf)

    def decode(value: Any) -> float:
        if type(value) not in (float, int) or not math.isfinite(value) or not bounds.low <= value <= bounds.high:
            raise InvalidMessage(f"{path} is not a finite number in range")
        return float(value)

    return decode


def _str_decoder(path: str, constraint: Any) -> _Coder:
    max_length = constraint.max_length if constraint else _MAX_STRING

    def decode(value: Any) -> str:
        if type(value) is not str or len(value) > max_length:
            raise InvalidMessage(f"{path} is not a string of at most {max_length} characters")
        return value

    return decode


def _bytes_decoder(path: str, constraint: Any) -> _Coder:
    max_length = constraint.max_length if constraint else _MAX_BYTES

    def decode(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > max_length:
            raise InvalidMessage(f"{path} is not a byte string of at most {max_length} bytes")
        return value

    return decode


def _tuple_decoder(path: str, arguments: tuple[Any, ...], constraint: Any) -> _Coder:
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError(f"{path}: only tuple[X, ...] is part of the wire format")
    item = _decoder(f"{path}[]", arguments[0])
    max_items = constraint.max_length if constraint else _MAX_ITEMS

    def decode(values: Any) -> tuple[Any, ...]:
        if type(values) is not list or len(values) > max_items:
            raise InvalidMessage(f"{path} is not a list of at most {max_items} items")
        return tuple(item(value) for value in values)

    return decode


def _packed_decoder(path: str, packed: Packed) -> _Coder:
    item_bytes = array(packed.typecode).itemsize

    def decode(value: Any) -> tuple[Any, ...]:
        if type(value) is not bytes or len(value) % item_bytes or len(value) > packed.max_items * item_bytes:
            raise InvalidMessage(f"{path} is not a packed list of at most {packed.max_items} numbers")
        numbers = array(packed.typecode)
        numbers.frombytes(value)
        if sys.byteorder == "big":
            numbers.byteswap()
        if not all(map(math.isfinite, numbers) if packed.typecode in "fd" else ()):
            raise InvalidMessage(f"{path} holds a number that is not finite")
        return tuple(numbers)

    return decode


def _pack(typecode: str, values: tuple[Any, ...]) -> bytes:
    numbers = array(typecode, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
