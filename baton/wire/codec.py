"""Control messages on the wire: frozen dataclasses <-> bytes, validated field by field, checksummed.

Owns the envelope and what the annotations of a message class mean on the wire; msgspec reads and checks the values.
Does not know any message: a `Codec` is built from the message classes that one connection may carry, so a message that
is not in its vocabulary cannot be decoded.

Envelope, little endian:  magic b"BT" | u16 protocol version | u32 body length | u64 xxh3_64 of the body | body
Body: a msgpack map {"t": tag, field: value, ...}; the tag is the class name. All fields must be present, none may be
unknown. A flipped bit fails the checksum, so a damaged message is never taken for another valid one.

Invariants: `decode` raises `InvalidMessage` or `Refused` and nothing else, whatever bytes it is given. It builds
nothing that the message class does not have and nothing beyond a field's bounds, so the memory it takes is a small
multiple of the frame's bytes, whatever lengths the frame announces.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import struct
import sys
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

import msgspec
import xxhash

from baton.wire.errors import InvalidMessage, Refused

PROTOCOL_VERSION = 22
"""The versions differ as follows.

1: registration, two legs at once, grant, push, commit, release, revoke.
2: blocks are verified as they arrive (Pushed), damaged ones are sent again (Resend), the kind of checksum is agreed on,
   and what a handoff took is reported.
3: the clock of a node, and by it the times of a request's first tokens.
4: pools in device memory: dot64 checksums, `needs_fence`, the memory of a nixl pool.
5: the words of the glossary (`sampled_us`).
6: log probabilities of prompt tokens (`PromptLogprobs`), allowed tokens and bad words; choices of one prompt share its
legs and its handoff (`forks`, `firsts`).
7: preemptions in a node's status.
8: sessions: messages between router and nodes are numbered, acknowledged and sent again when they were lost.
9: grammars that an output must obey (`grammar`), and the digest of a node's tokenizer.
10: what a node's steps cost; grammars of the kind "lark"; a decode node hands the KV of a running request to another
one (`HandOver`), and a node is asked to finish (`Drain`); addresses name the key of who listens there.
11: a node serves several routers: ids of requests begin with the epoch of their router; what a node prefers, and the
goal of a request between tokens.
12: the group of a node; layers that keep a state.
13: blocks of nodes whose ranks have pools of their own go from rank to rank (`source`, `RankEndpoints`); KV in 8 bits.
14: the same by nixl and shared memory (`source` of their headers, `RankEndpoint`), and states divided among ranks;
ranks of a node run on other machines (`baton.ranks.machines.link`); images of prompts (`images`, `sees_images`).
15: leased blocks in a node's status; the goal of a request for its first token.
16: all processes that write for a node (`writers`).
17: how long a node's start took.
18: the prompt of a leg is one value (`prompt`), and what was emitted already stands beside it (`output_ids`); what was
read of a prompt's rows is told whatever it is (`PromptRead`).
19: media of a prompt have a kind (`media`, in place of `images`), and nodes name the kinds that they compute.
20: a node copies the beginning of a prompt out of another one's prefix cache (`Lend`, `Pull`, `Pulled`); how full the
tiers of its KV store are, and how many tokens of a prompt came from them (`tiers`).
21: a leg waits for its prefix at its node (`awaited`), which uses what has come of it (checksums in `Pushed`).
22: what an output may be like (`prediction_ids`); the draft by which tokens were found, and a node's counts (`drafts`);
how many tokens of a handoff have KV of a draft model beside their own (`num_drafted`).
"""

_MAGIC = b"BT"
_HEADER = struct.Struct("<2sHIQ")
MAX_MESSAGE_BYTES = 16 * 2**20
_MAX_STRING = 4096
_MAX_BYTES = 64 * 1024
_MAX_ITEMS = 65_536
_MAX_REASON = 200
_TAG = "t"


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
    """A tuple of numbers sent as one little-endian byte string; `typecode` as in the struct module."""

    typecode: str
    max_items: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """A record of one of these classes, where the field's type is what they have in common."""

    kinds: tuple[type[Any], ...]


Constraint = Bounds | Length | Packed | OneOf
U32 = Annotated[int, Bounds(0, 2**32 - 1)]
U64 = Annotated[int, Bounds(0, 2**64 - 1)]
Id128 = Annotated[bytes, Length(16)]
TokenIds = Annotated[tuple[int, ...], Packed("I", 2**20)]
BlockIds = Annotated[tuple[int, ...], Packed("I", 2**18)]
U64s = Annotated[tuple[int, ...], Packed("Q", 2**18)]


class Codec:
    """Encodes and decodes the messages of one vocabulary, `message_types`.

    Raises `TypeError` at construction for a field type that it cannot validate.
    """

    def __init__(self, *message_types: type[Any]) -> None:
        self.message_types = message_types
        self._messages = _Kinds(message_types)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(self._messages.wire_type)

    def encode(self, message: object) -> bytes:
        """One envelope holding `message`. Raises `InvalidMessage` when it is larger than any peer would accept."""
        body = self._encoder.encode(self._messages.to_wire(message))
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidMessage(f"{type(message).__name__} of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
        return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body

    def decode(self, frame: bytes) -> Any:
        """The message in `frame`. Raises `InvalidMessage`, or `Refused` when the peer speaks another version."""
        body = _open_envelope(frame)
        try:
            found = self._decoder.decode(body)
        except Exception as error:  # hostile bytes cause errors of several kinds, which all mean the same
            raise InvalidMessage(f"body is not a message: {error}"[:_MAX_REASON]) from None
        return self._messages.from_wire(found)


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


class _Field(Protocol):
    """How values of one type travel. `wire_type` is what msgspec encodes, and validates when it decodes.
    `keeps_empty`: None and what has no items travel as they are, so that nothing need be called for them."""

    @property
    def wire_type(self) -> Any: ...

    @property
    def keeps_empty(self) -> bool: ...

    def to_wire(self, value: Any) -> Any:
        """The value that is encoded. Raises `InvalidMessage` when it has more items than a peer accepts."""
        ...

    def from_wire(self, value: Any) -> Any:
        """The value of the message, made of a valid `wire_type`. Raises `InvalidMessage` for what no type can say."""
        ...


@dataclass(frozen=True, slots=True)
class _Scalar:
    """Travels as it is."""

    wire_type: Any
    keeps_empty: bool = True

    def to_wire(self, value: Any) -> Any:
        return value

    def from_wire(self, value: Any) -> Any:
        return value


class _PackedNumbers:
    """Numbers of one type, as a little-endian byte string on the wire."""

    keeps_empty = False

    def __init__(self, packed: Packed) -> None:
        self._typecode = packed.typecode
        self._max_items = packed.max_items
        self._one = struct.Struct(f"<{packed.typecode}")
        self._item_bytes = self._one.size
        self._is_float = packed.typecode in "fd"
        self.wire_type = Annotated[bytes, msgspec.Meta(max_length=packed.max_items * self._item_bytes)]

    def to_wire(self, value: tuple[Any, ...]) -> bytes:
        if len(value) == 1:  # the usual case is one token of a step: parsing a format would take most of the time
            return self._one.pack(*value)
        if not value:
            return b""
        _require_short(value, self._max_items)
        return struct.pack(f"<{len(value)}{self._typecode}", *value)

    def from_wire(self, value: bytes) -> tuple[Any, ...]:
        if len(value) == self._item_bytes and not self._is_float:
            return self._one.unpack(value)
        if not value:
            return ()
        num_items, num_odd_bytes = divmod(len(value), self._item_bytes)
        if num_odd_bytes:
            raise InvalidMessage(f"{len(value)} bytes are no list of numbers of {self._item_bytes} bytes")
        numbers = struct.unpack(f"<{num_items}{self._typecode}", value)
        if self._is_float and not all(map(math.isfinite, numbers)):
            raise InvalidMessage("a list of numbers has one that is not finite")
        return numbers


class _Optional:
    """`X | None`."""

    def __init__(self, inner: _Field) -> None:
        self._inner = inner
        self.keeps_empty = inner.keeps_empty
        self.wire_type = inner.wire_type | None

    def to_wire(self, value: Any) -> Any:
        return None if value is None else self._inner.to_wire(value)

    def from_wire(self, value: Any) -> Any:
        return None if value is None else self._inner.from_wire(value)


class _Items:
    """`tuple[X, ...]`."""

    keeps_empty = True

    def __init__(self, item: _Field, max_items: int) -> None:
        self._item = item
        self._max_items = max_items
        items = types.GenericAlias(tuple, (item.wire_type, ...))
        self.wire_type = Annotated[items, msgspec.Meta(max_length=max_items)]

    def to_wire(self, value: tuple[Any, ...]) -> list[Any]:
        _require_short(value, self._max_items)
        return [self._item.to_wire(item) for item in value]

    def from_wire(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._item.from_wire(item) for item in value])  # a list first is faster than a generator


class _Record:
    """A dataclass. It travels as a struct of msgspec with the same fields, all of them required.

    The struct of a message, or of one of several kinds, carries the tag.
    """

    keeps_empty = True  # an instance is never empty

    def __init__(self, kind: type[Any], *, is_tagged: bool = False) -> None:
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"{kind.__name__} is not a dataclass")
        hints = get_type_hints(kind, include_extras=True)
        self.kind: type[Any] = kind
        names = [field.name for field in dataclasses.fields(kind)]
        fields = [_field(f"{kind.__name__}.{name}", hints[name]) for name in names]
        self._values = _values_getter(names)
        self._converted = [(place, field) for place, field in enumerate(fields) if not isinstance(field, _Scalar)]
        self.wire_type: Any = msgspec.defstruct(
            kind.__name__,
            [(name, field.wire_type) for name, field in zip(names, fields, strict=True)],
            tag_field=_TAG if is_tagged else None,
            forbid_unknown_fields=True,
            gc=False,
        )

    def to_wire(self, value: Any) -> Any:
        values = list(self._values(value))
        for place, field in self._converted:
            if values[place] or not field.keeps_empty:
                values[place] = field.to_wire(values[place])
        return self.wire_type(*values)

    def from_wire(self, value: Any) -> Any:
        values: list[Any] = list(msgspec.structs.astuple(value))
        for place, field in self._converted:
            if values[place] or not field.keeps_empty:
                values[place] = field.from_wire(values[place])
        try:
            return self.kind(*values)
        except Exception as error:  # a record may validate itself; whatever it finds is this message's error
            raise InvalidMessage(f"{self.kind.__name__}: {error}"[:_MAX_REASON]) from None


class _Nothing(msgspec.Struct, tag_field=_TAG, tag=""):
    """No kind at all. Where there is a single one, msgspec would take it without its tag, too."""


class _Kinds:
    """A dataclass of one of several kinds; its tag says of which. No other is built, whatever a peer names."""

    keeps_empty = True  # as of a record

    def __init__(self, kinds: Iterable[type[Any]]) -> None:
        records = [_Record(kind, is_tagged=True) for kind in kinds]
        self._by_kind = {record.kind: record for record in records}
        self._by_wire_type = {record.wire_type: record for record in records}
        self.wire_type: Any = Union[(*self._by_wire_type, _Nothing)]

    def to_wire(self, value: Any) -> Any:
        record = self._by_kind.get(type(value))
        if record is None:
            raise InvalidMessage(f"{type(value).__name__} does not belong on this connection")
        return record.to_wire(value)

    def from_wire(self, value: Any) -> Any:
        record = self._by_wire_type.get(type(value))
        if record is None:
            raise InvalidMessage("the tag of a record is empty")
        return record.from_wire(value)


def _values_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:  # attrgetter returns no tuple when it has one name
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _require_short(value: tuple[Any, ...], max_items: int) -> None:
    if len(value) > max_items:
        raise InvalidMessage(f"a list of {len(value)} items is larger than {max_items}")


def _field(path: str, hint: Any) -> _Field:
    """How a field with this annotation travels. Raises `TypeError` for what is not part of the wire format."""
    hint, constraint = _split(hint)
    if get_origin(hint) in (types.UnionType, Union):
        members = [member for member in get_args(hint) if member is not type(None)]
        if len(members) != 1 or len(get_args(hint)) != 2:
            raise TypeError(f"{path}: unions other than 'X | None' are not part of the wire format")
        return _Optional(_field(path, members[0]))
    if isinstance(constraint, Packed):
        return _PackedNumbers(constraint)
    if get_origin(hint) is tuple:
        if len(get_args(hint)) != 2 or get_args(hint)[1] is not Ellipsis:
            raise TypeError(f"{path}: only tuple[X, ...] is part of the wire format")
        max_items = constraint.max_length if isinstance(constraint, Length) else _MAX_ITEMS
        return _Items(_field(f"{path}[]", get_args(hint)[0]), max_items)
    if isinstance(constraint, OneOf):
        return _Kinds(constraint.kinds)
    if dataclasses.is_dataclass(hint):
        return _Record(typing.cast(type[Any], hint))
    return _Scalar(_scalar(path, hint, constraint))


def _split(hint: Any) -> tuple[Any, Constraint | None]:
    """(type, the constraint it is annotated with or None)."""
    if get_origin(hint) is not Annotated:
        return hint, None
    inner, *extras = get_args(hint)
    return inner, next((extra for extra in extras if isinstance(extra, Constraint)), None)


def _scalar(path: str, hint: Any, constraint: Any) -> Any:
    """The msgspec type of a scalar with its bounds."""
    if hint is bool:
        return bool
    if hint is int:
        bounds = constraint or Bounds(0, 2**63 - 1)
        # msgpack has no integers beyond u64, and msgspec compares with 64 signed bits
        limit = None if bounds.high == 2**64 - 1 else int(bounds.high)
        return Annotated[int, msgspec.Meta(ge=int(bounds.low), le=limit)]
    if hint is float:
        low, high = (constraint.low, constraint.high) if constraint else (-sys.float_info.max, sys.float_info.max)
        return Annotated[float, msgspec.Meta(ge=low, le=high)]  # NaN lies outside every range
    longest = {str: _MAX_STRING, bytes: _MAX_BYTES}
    if hint not in longest:
        raise TypeError(f"{path}: {hint} is not part of the wire format")
    return Annotated[hint, msgspec.Meta(max_length=constraint.max_length if constraint else longest[hint])]
