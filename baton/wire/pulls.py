"""The messages about a pull: one node copies the KV of a prompt's beginning out of the prefix cache of another.

Owns their fields, as `baton.wire.messages` does of all others between router and nodes. A pull has the handoff id of
the request that it is for, and an attempt of its own. `docs/protocol.md` says what answers each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, Bounds, Id128, Length
from baton.wire.prompt import Prompt

_Name = Annotated[str, Length(128)]
_Count = Annotated[int, Bounds(0, 2**40)]
_Attempt = Annotated[int, Bounds(1, 10**6)]
_Seconds = Annotated[float, Bounds(0, 1e6)]


@dataclass(frozen=True, slots=True)
class AwaitedPrefix:
    """A part of a leg, for the node that computes its prompt: wait for the pull of this attempt number, from now on for
    `patience_s`, and `token_s` longer for each token that has come. Then compute what is missing. A `Cancel` of that
    number ends the wait too."""

    attempt: _Attempt
    patience_s: _Seconds
    token_s: _Seconds


@dataclass(frozen=True, slots=True)
class Lend:
    """Router -> node that is expected to have `prompt` cached, whole blocks of it: hold what you have of its beginning,
    and hand it over to that node. The answer is `HandedOver`. Media have no payload."""

    handoff_id: Id128
    attempt: _Attempt
    prompt: Prompt
    node_id: _Name
    epoch: U64


@dataclass(frozen=True, slots=True)
class Pull:
    """Router -> node: take the KV of `prompt` from the node of that name, life and address, which holds it, into the
    prefix cache. The answer is `Pulled`, or `Failed`, where some of it may have come."""

    handoff_id: Id128
    attempt: _Attempt
    prompt: Prompt
    node_id: _Name
    epoch: U64
    address: _Name


@dataclass(frozen=True, slots=True)
class Pulled:
    """Node -> router, behind the `CacheEvents` about them: so many tokens of the pull lie verified in the prefix cache.
    `num_bytes` of them were moved, in `transfer_us` from the grant on."""

    epoch: U64
    handoff_id: Id128
    attempt: _Attempt
    num_tokens: _Count
    num_bytes: _Count
    transfer_us: _Count
