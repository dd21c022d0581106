from __future__ import annotations

import itertools
import math
import random
import struct
import tracemalloc
from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.kvtransfer.messages import RECEIVER_TO_SENDER, HandoffName, Renew, Resend
from baton.wire.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Codec
from baton.wire.errors import InvalidMessage, Refused
from baton.wire.messages.membership import Ping, Welcome
from baton.wire.messages.output import TokenLogprobs, Tokens
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.prompt import Prompt
from tests.wire.wire_samples import EVENT, SAMPLES, record

HEADER = struct.Struct("<2sHIQ")


def sealed(body: bytes, *, magic: bytes = b"BT", version: int = PROTOCOL_VERSION) -> bytes:
    """A correct envelope around any body."""
    return HEADER.pack(magic, version, len(body), xxhash.xxh3_64_intdigest(body)) + body


def fields_of(frame: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(frame[HEADER.size :])
    return fields


def changed(codec: Codec, message: Any, path: str, value: Any) -> bytes:
    """The frame of `message` with one field, "outer.inner", replaced."""
    fields = fields_of(codec.encode(message))
    *outer, last = path.split(".")
    inner = fields
    for name in outer:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[last] = value
    return sealed(msgpack.packb(fields))


def sample(name: str) -> tuple[Codec, Any]:
    return next((codec, message) for codec, message in SAMPLES if type(message).__name__ == name)


def test_every_message_survives_the_wire() -> None:
    for codec, message in SAMPLES:
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(("codec", "message"), SAMPLES, ids=lambda value: type(value).__name__)
def test_any_valid_values_survive_the_wire(codec: Codec, message: Any) -> None:
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(record(type(message)))
    def round_trip(generated: Any) -> None:
        assert codec.decode(codec.encode(generated)) == generated

    round_trip()


def test_a_missing_field_and_an_extra_field_are_rejected() -> None:
    for codec, message in SAMPLES:
        fields = fields_of(codec.encode(message))
        lacking = [{key: value for key, value in fields.items() if key != name} for name in fields]
        for wrong in (*lacking, {**fields, "more": 1}):
            with pytest.raises(InvalidMessage):
                codec.decode(sealed(msgpack.packb(wrong)))


def test_each_field_rejects_values_of_another_type() -> None:
    values: list[Any] = [{"x": 1}, [[]], -(2**63), float("nan"), "\x00" * 5000, b"\x00" * (2**20 + 1)]
    for codec, message in SAMPLES:
        fields = fields_of(codec.encode(message))
        for name, wrong in itertools.product(fields.keys() - {"t"}, values):
            with pytest.raises(InvalidMessage):
                codec.decode(sealed(msgpack.packb({**fields, name: wrong})))


OUT_OF_RANGE: list[tuple[str, str, Any]] = [
    ("Ping", "session", -1),
    ("Ping", "session", True),
    ("Ping", "session", 1.0),
    ("Ping", "session", None),
    ("Ping", "session", "1"),
    ("Cancel", "attempt", 0),
    ("Cancel", "attempt", 10**6 + 1),
    ("Cancel", "handoff_id", b"h" * 17),
    ("Cancel", "handoff_id", "h" * 16),
    ("Refusal", "message", "x" * 1025),
    ("Refusal", "message", b"x"),
    ("CacheEvents", "is_snapshot", 1),
    ("Heartbeat", "status", None),
    ("Heartbeat", "status.num_running", -1),
    ("Heartbeat", "status.num_running", 2**41),
    ("Heartbeat", "status.loop_age_s", math.nan),
    ("Heartbeat", "status.loop_age_s", math.inf),
    ("Heartbeat", "status.loop_age_s", -0.5),
    ("Prefill", "token_ids", b"123"),
    ("Prefill", "token_ids", [1, 2]),
    ("Prefill", "token_ids", b"\x00" * 4 * (2**20 + 1)),
    ("Prefill", "params.temperature", 2.5),
    ("Prefill", "params.temperature", False),
    ("Prefill", "params.top_p", 0),
    ("Prefill", "params.max_tokens", 0),
    ("Prefill", "params.min_tokens", 6),
    ("Prefill", "params.logit_bias_values", b""),
    ("Prefill", "params.logit_bias_values", array("d", [math.nan]).tobytes()),
    ("Decode", "prefill_peer.epoch", 2**63 * 2 - 1 + 0.5),
    ("Tokens", "events.0.logprobs.0.logprob", math.nan),
    ("Tokens", "events.0.logprobs.0.logprob", -math.inf),
    ("Tokens", "events.0.logprobs.0.top_logprobs", array("d", [math.nan, 0.0]).tobytes()),
    ("Tokens", "events.0.logprobs.0.top_logprobs", array("d", [0.0] * 21).tobytes()),
    ("Hello", "layout.dtype", "int3"),
    ("PeerHello", "endpoints", [{"transport": "shm", "address": "a", "details": b""}] * 9),
    ("Hello", "layout.block_size", 0),
    ("Hello", "layout.groups", []),
    ("Hello", "layout.groups.0.layers", [1, 2]),
    ("Hello", "layout.groups.0.kv.kind", "values"),
    ("Hello", "layout.groups.0.kv.window", 0),
    ("Grant", "generations", b"\x00" * 7),
]


def test_a_field_out_of_its_type_or_range_is_rejected() -> None:
    for name, path, value in OUT_OF_RANGE:
        codec, message = sample(name)
        with pytest.raises(InvalidMessage):
            codec.decode(changed(codec, message, path, value))


@pytest.mark.parametrize("tag", ["Nothing", "", 5, None, b"Ping"])
def test_an_unknown_tag_is_rejected(tag: Any) -> None:
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(sealed(msgpack.packb({"t": tag, "session": 1})))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", msgpack.packb(1), msgpack.packb({}), msgpack.packb([1, 2])])
def test_a_body_that_is_no_tagged_map_is_rejected(body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(sealed(body))


def test_trailing_bytes_are_rejected() -> None:
    frame = ROUTER_TO_NODE.encode(Ping(1, 2, 3))
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(frame + b"\x00")
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(sealed(frame[HEADER.size :] + b"\x00"))


def test_a_message_of_the_other_direction_is_not_in_the_vocabulary() -> None:
    with pytest.raises(InvalidMessage, match="Ping"):
        NODE_TO_ROUTER.decode(ROUTER_TO_NODE.encode(Ping(1, 2, 3)))
    with pytest.raises(InvalidMessage, match="Ping"):
        NODE_TO_ROUTER.encode(Ping(1, 2, 3))


def test_another_protocol_version_is_refused_with_both_values() -> None:
    body = ROUTER_TO_NODE.encode(Ping(1, 2, 3))[HEADER.size :]
    with pytest.raises(Refused, match=f"{PROTOCOL_VERSION + 1} .*{PROTOCOL_VERSION}"):
        ROUTER_TO_NODE.decode(sealed(body, version=PROTOCOL_VERSION + 1))


def test_another_magic_is_rejected() -> None:
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(sealed(ROUTER_TO_NODE.encode(Ping(1, 2, 3))[HEADER.size :], magic=b"TB"))


def test_every_truncation_is_rejected() -> None:
    frame = ROUTER_TO_NODE.encode(Welcome(3))
    for length in range(len(frame)):
        with pytest.raises(InvalidMessage):
            ROUTER_TO_NODE.decode(frame[:length])


def test_a_damaged_frame_never_passes_for_another_message() -> None:
    chance = random.Random(0)
    frames = [(codec, message, codec.encode(message)) for codec, message in SAMPLES]
    for _ in range(20_000):
        codec, message, frame = chance.choice(frames)
        try:
            found = codec.decode(mutated(frame, chance))
        except (InvalidMessage, Refused):
            continue
        assert found == message


def test_a_mutated_body_in_a_correct_envelope_raises_nothing_but_invalid_message() -> None:
    chance = random.Random(1)
    frames = [(codec, codec.encode(message)[HEADER.size :]) for codec, message in SAMPLES]
    num_rejected = 0
    for _ in range(20_000):
        codec, body = chance.choice(frames)
        try:
            found = codec.decode(sealed(mutated(body, chance)))
        except InvalidMessage:
            num_rejected += 1
            continue
        assert codec.decode(codec.encode(found)) == found
    assert num_rejected > 5_000


@settings(max_examples=200, deadline=None, database=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_invalid_message(noise: bytes) -> None:
    for frame in (noise, sealed(noise)):
        with pytest.raises(InvalidMessage):
            ROUTER_TO_NODE.decode(frame)


@pytest.mark.parametrize(
    "head",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
    ],
)
def test_a_huge_announced_length_allocates_nothing(head: bytes) -> None:
    frames = [sealed(head), sealed(b"\x81\xa1t" + head), sealed(b"\x91" * 3000)]
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(InvalidMessage):
                ROUTER_TO_NODE.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_frame_above_the_limit_is_rejected_on_both_sides() -> None:
    with pytest.raises(InvalidMessage):
        ROUTER_TO_NODE.decode(b"BT" + bytes(MAX_MESSAGE_BYTES + HEADER.size))
    codec, tokens = sample("Tokens")
    with pytest.raises(InvalidMessage, match="larger"):
        codec.encode(type(tokens)(1, (replace(EVENT, token_ids=(0,) * 2**18),) * 17))


@dataclass(frozen=True)
class _Untyped:
    anything: object


@dataclass(frozen=True)
class _FixedTuple:
    pair: tuple[int, int]


@dataclass(frozen=True)
class _Union:
    either: int | str


@pytest.mark.parametrize("kind", [_Untyped, _FixedTuple, _Union, int])
def test_a_vocabulary_with_a_field_that_cannot_be_validated_is_not_built(kind: type[Any]) -> None:
    with pytest.raises(TypeError):
        Codec(kind)


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(changed)) if changed else 0
        action = chance.randrange(5)
        if action == 0 and changed:
            changed[place] ^= 1 << chance.randrange(8)
        elif action == 1 and changed:
            changed[place] = chance.randrange(256)
        elif action == 2:
            del changed[place : place + chance.randrange(1, 4)]
        elif action == 3:
            changed[place:place] = chance.randbytes(chance.randrange(1, 4))
        else:
            changed = changed[: chance.randrange(len(changed) + 1)]
    return bytes(changed)


def list_of(num_items: int, item: bytes) -> bytes:
    return b"\xdd" + num_items.to_bytes(4, "big") + item * num_items


@pytest.mark.parametrize(
    ("item", "is_deep"), [(b"\x90", False), (b"\x80", False), (b"\xa2ab", False), (b"\xcd\xff\xff", True)]
)
@pytest.mark.parametrize("name", [b"handoffs", b"unknown"])
def test_what_would_take_far_more_memory_than_its_bytes_is_rejected_before_it_does(
    item: bytes, is_deep: bool, name: bytes
) -> None:
    body = (b"\xdc\xff\xff" + item * 65_534) * 6 if is_deep else list_of(6, list_of(65_535, item))
    field = bytes([0xA0 + len(name)]) + name + body
    frames = [sealed(b"\x82\xa1t\xa5Renew" + field), sealed(b"\x82" + field + b"\xa1t\xa5Renew")]
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(InvalidMessage):
                RECEIVER_TO_SENDER.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < len(frames[0]) + 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (RECEIVER_TO_SENDER, Renew((HandoffName(b"", 1),) * 8_192)),
        (NODE_TO_ROUTER, Tokens(1, (replace(EVENT, handoff=None, times=None, token_ids=(), logprobs=()),) * 4_096)),
        (NODE_TO_ROUTER, Tokens(1, (replace(EVENT, logprobs=(TokenLogprobs(0.5, (), ()),) * 4_096),) * 2)),
        (NODE_TO_ROUTER, Tokens(1, (replace(EVENT, token_ids=tuple(range(2**32 - 2**16, 2**32))),) * 2)),
    ],
    ids=["records", "records with records", "records within records", "numbers"],
)
def test_what_a_message_costs_is_a_small_multiple_of_its_bytes(codec: Codec, message: Any) -> None:
    frame = codec.encode(message)
    tracemalloc.start()
    try:
        codec.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 13 * len(frame)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [15, 16, 2**16 - 1, 2**32 - 1])
def test_nested_lists_that_only_announce_their_length_allocate_nothing(length: int) -> None:
    head = msgpack.Packer().pack_array_header(length)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessage):
            ROUTER_TO_NODE.decode(sealed(head * 500 + bytes(2**16)))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_large_messages_with_few_values_pass() -> None:
    codec, prefill = sample("Prefill")
    token_ids = tuple(range(2**32 - 2**18, 2**32))
    large = replace(prefill, prompt=Prompt(token_ids))
    assert codec.decode(codec.encode(large)) == large
    codec, tokens = sample("Tokens")
    many = type(tokens)(1, (EVENT,) * 5_000)
    frame = codec.encode(many)
    assert len(frame) > 2**18
    assert codec.decode(frame) == many


@pytest.mark.parametrize(
    "message",
    [
        Renew((HandoffName(b"", 1),) * 65_537),
        Resend(HandoffName(b"", 1), 0, (0,) * (2**18 + 1)),
    ],
    ids=["records", "numbers"],
)
def test_a_list_that_no_peer_would_decode_is_not_encoded(message: Any) -> None:
    with pytest.raises(InvalidMessage, match="larger"):
        RECEIVER_TO_SENDER.encode(message)
