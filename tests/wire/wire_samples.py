"""One valid message of every class that travels between programs, and hypothesis strategies for all others."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from baton.kvtransfer.messages import (
    RECEIVER_TO_SENDER,
    SENDER_TO_RECEIVER,
    Commit,
    Endpoint,
    Grant,
    HandoffName,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    ProcessIdentity,
    Pushed,
    Release,
    Renew,
    Resend,
    Revoke,
    Revoked,
)
from baton.wire.codec import Bounds, Codec, Constraint, Length, OneOf, Packed
from baton.wire.drafts import DraftsOfMethod, VerifiedDraft
from baton.wire.grammar import Grammar
from baton.wire.images import PromptImage, digest_of
from baton.wire.layout import DTYPE_BYTES, KvLayout, LayerKv
from baton.wire.media import Medium
from baton.wire.messages.legs import Cancel, Decode, Prefill, PrefillPeer
from baton.wire.messages.membership import (
    Heartbeat,
    Hello,
    Introduce,
    Leaving,
    NodeStatus,
    Ping,
    Pong,
    Refusal,
    Resume,
    Welcome,
)
from baton.wire.messages.output import Failed, HandoffFigures, PromptRead, StepTimes, TokenEvent, TokenLogprobs, Tokens
from baton.wire.messages.prefixes import AwaitedPrefix, CacheEvents
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from baton.wire.tiers import TierTokens, TierUsage

LAYOUT = KvLayout.of_layers("bfloat16", 16, [LayerKv(4, 64), LayerKv(4, 64, window=128)])
DRAFTS = DraftsOfMethod("ngram", 9, (9, 5), (4, 1))
STATUS = NodeStatus(1, 2, 3, 4, 5, 0.25, 6, tiers=(TierUsage("host", 0.5),), drafts=(DRAFTS,))
TEN_YEARS_US = 10 * 365 * 24 * 3600 * 10**6
PARAMS = DecodingParams(
    temperature=0.5,
    logit_bias_ids=(7,),
    logit_bias_values=(-3.5,),
    seed=-1,
    max_tokens=5,
    stop_token_ids=(1, 2),
    logprobs=2,
    prompt_logprobs=3,
    allowed_token_ids=(5, 6),
    bad_word_ids=((5,), (6, 5)),
    grammar=Grammar.regex("[a-z]+"),
    prediction_ids=(4, 5, 4),
)
EVENT = TokenEvent(b"h" * 16, 1, 3, (17,), (TokenLogprobs(-0.5, (17, 4), (-0.5, -2.0)),), "stop", 16)
TIMED_EVENT = dataclasses.replace(
    EVENT,
    handoff=HandoffFigures(3, 4096, 900, 12),
    times=StepTimes(None, TEN_YEARS_US - 9, TEN_YEARS_US),
    tiers=(TierTokens("host", 12), TierTokens("disk", 4)),
    draft=VerifiedDraft("prediction", 4, 3),
)
IMAGE = PromptImage(1, 2, digest_of(2, 3, bytes(range(18))), bytes(range(18)), 2, 3)
SALTED = Prompt((1, 2, 3), b"salt", (), b"a" * 16)
NAME = HandoffName(b"h" * 16, 2)
PROCESS = ProcessIdentity("host", 4711, 99)

SAMPLES: tuple[tuple[Codec, Any], ...] = (
    (ROUTER_TO_NODE, Welcome(2**64 - 1, 2**63 - 1)),
    (ROUTER_TO_NODE, Refusal("no")),
    (ROUTER_TO_NODE, Ping(1, 2, 3)),
    (ROUTER_TO_NODE, Resume(1, 2)),
    (ROUTER_TO_NODE, Introduce()),
    (ROUTER_TO_NODE, Prefill(b"h" * 16, 1, SALTED, PARAMS, "decode-1", 8, (), (b"i" * 16, b"j" * 16))),
    (ROUTER_TO_NODE, Prefill(b"h" * 16, 1, Prompt((1, 5, 5), b"", (IMAGE,)), PARAMS, "decode-1", 8)),
    (ROUTER_TO_NODE, Decode(b"h" * 16, 1, SALTED, PARAMS, PrefillPeer("p", 1, "tcp://127.0.0.1:5"), (4, 5))),
    (ROUTER_TO_NODE, Decode(b"h" * 16, 1, SALTED, PARAMS, None, awaited=AwaitedPrefix(2, 0.5, 1e-4))),
    (ROUTER_TO_NODE, Cancel(b"h" * 16, 1000)),
    (NODE_TO_ROUTER, Hello("decode", "d", 1, "f", LAYOUT, "", "http://x", 64, 1024, 8, STATUS, "0a1b2c3d", 9, "5e6f")),
    (NODE_TO_ROUTER, Heartbeat(1, STATUS)),
    (NODE_TO_ROUTER, Pong(1, 2, 3, b"k" * 40, 4, 5)),
    (NODE_TO_ROUTER, Leaving(1)),
    (NODE_TO_ROUTER, Tokens(1, (EVENT, TIMED_EVENT))),
    (NODE_TO_ROUTER, PromptRead(1, b"h" * 16, 1, 256, 2, b"\x00\x00\x80\xbf" * 12)),
    (NODE_TO_ROUTER, Failed(b"h" * 16, 1, "overloaded", "later")),
    (NODE_TO_ROUTER, CacheEvents(1, True, b"s" * 32, b"")),
    (RECEIVER_TO_SENDER, PeerHello("d", 1, 2, "f", LAYOUT, 64, "xxh3", PROCESS, (Endpoint("shm", "n", b"\x00m"),))),
    (RECEIVER_TO_SENDER, Grant(NAME, 1, 2, 40, 16, b"d" * 16, (5, 9), (1, 2**64 - 1))),
    (RECEIVER_TO_SENDER, Resend(NAME, 1, (0, 7))),
    (RECEIVER_TO_SENDER, Release(NAME)),
    (RECEIVER_TO_SENDER, Revoke(NAME)),
    (RECEIVER_TO_SENDER, Renew((NAME, NAME))),
    (SENDER_TO_RECEIVER, PeerWelcome("p", 2, "shm", (PROCESS, PROCESS))),
    (SENDER_TO_RECEIVER, PeerRefusal("model differs")),
    (SENDER_TO_RECEIVER, Commit(NAME, 1, 2, 40, b"d" * 16, (1, 2), (3, 4), (EVENT, EVENT), 1, 250, 37)),
    (SENDER_TO_RECEIVER, Pushed(NAME, (0, 1, 9))),
    (SENDER_TO_RECEIVER, Pushed(NAME, (0, 1), (2**64 - 1, 0))),
    (SENDER_TO_RECEIVER, Revoked(NAME, "gone", False, True)),
    (SENDER_TO_RECEIVER, Renew(())),
)
_ARRAY_ITEMS: dict[str, st.SearchStrategy[Any]] = {
    "I": st.integers(0, 2**32 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False, allow_infinity=False),
}


def valid(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    constraint = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        constraint = next((extra for extra in extras if isinstance(extra, Constraint)), None)
    if get_origin(hint) in (types.UnionType, typing.Union):
        return st.none() | valid(next(member for member in get_args(hint) if member is not types.NoneType))
    if isinstance(constraint, OneOf):
        return st.one_of(*map(record, constraint.kinds))
    if isinstance(constraint, Packed):
        max_size = min(constraint.max_items, 20)
        return st.lists(_ARRAY_ITEMS[constraint.typecode], max_size=max_size).map(tuple)
    if get_origin(hint) is tuple:
        return st.lists(valid(get_args(hint)[0]), max_size=3).map(tuple)
    if hint is DecodingParams:
        return _decoding_params()
    if hint is KvLayout:
        count = st.integers(1, 2**20)
        layers = st.lists(st.builds(LayerKv, count, count, st.none() | count), min_size=1, max_size=5)
        return st.builds(KvLayout.of_layers, st.sampled_from(sorted(DTYPE_BYTES)), count, layers)
    if dataclasses.is_dataclass(hint):
        return record(typing.cast(type[Any], hint))
    return _scalar(hint, constraint)


def record(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Valid instances of a message class."""
    hints = get_type_hints(kind, include_extras=True)
    values = {field.name: valid(hints[field.name]) for field in dataclasses.fields(kind)}
    if issubclass(kind, Medium):
        values |= {"digest": st.binary(min_size=16, max_size=16), "payload": st.just(b"")}
    built = st.builds(kind, **values)
    return built | _images() if kind is PromptImage else built


def _scalar(hint: Any, constraint: Any) -> st.SearchStrategy[Any]:
    max_length = min(constraint.max_length, 40) if isinstance(constraint, Length) else 40
    low, high = (constraint.low, constraint.high) if isinstance(constraint, Bounds) else (0, 2**63 - 1)
    if hint is int:
        return st.integers(int(low), int(high))
    if hint is float and isinstance(constraint, Bounds):
        return st.floats(low, high)
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=max_length),
        bytes: st.binary(max_size=max_length),
    }
    return kinds[hint]


def _images() -> st.SearchStrategy[PromptImage]:
    def of_size(size: tuple[int, int]) -> st.SearchStrategy[PromptImage]:
        count = size[0] * size[1] * 3
        pixels = st.binary(min_size=count, max_size=count)
        return pixels.map(lambda pixels: PromptImage(5, 2, digest_of(*size, pixels), pixels, *size))

    return st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(of_size)


def _decoding_params() -> st.SearchStrategy[DecodingParams]:
    bias = st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=5)
    params = st.builds(
        DecodingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 2**31 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        min_tokens=st.integers(0, 10),
        max_tokens=st.none() | st.integers(10, 2**31 - 1),
        stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        allowed_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
        bad_word_ids=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
    )
    return st.tuples(params, bias).map(
        lambda made: dataclasses.replace(
            made[0], logit_bias_ids=tuple(made[1]), logit_bias_values=tuple(made[1].values())
        )
    )
