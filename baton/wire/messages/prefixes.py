"""The messages about prefix caches: what a node has, and a pull, in which it copies a prompt's beginning from another.

Owns their fields. A pull has the handoff id of the request that it is for, and an attempt of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, Bounds, Id128, Length
from baton.wire.messages.fields import Attempt, Count, Name
from baton.wire.prompt import Prompt

_Seconds = Annotated[float, Bounds(0, 1e6)]


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Node -> router: changes of the node's prefix cache, as 16-byte block hashes laid end to end.

    `is_snapshot` means forget what was known of this node. Losing one of these costs routing quality, nothing else.
    """

    epoch: U64
    is_snapshot: bool
    stored: Annotated[bytes, Length(2**20)]
    removed: Annotated[bytes, Length(2**20)]


@dataclass(frozen=True, slots=True)
class AwaitedPrefix:
    """A part of a leg, for the node that computes its prompt: wait for the pull of this attempt number, from now on for
    `patience_s`, and `token_s` longer for each token that has come. Then compute what is missing. A `Cancel` of that
    number ends the wait too."""

    attempt: Attempt
    patience_s: _Seconds
    token_s: _Seconds


@dataclass(frozen=True, slots=True)
class Lend:
    """Router -> node that is expected to have `prompt` cached, whole blocks of it: hold what you have of its beginning,
    and hand it over to that node. The answer is `HandedOver`. Media have no payload."""

    handoff_id: Id128
    attempt: Attempt
    prompt: Prompt
    node_id: Name
    epoch: U64


@dataclass(frozen=True, slots=True)
class Pull:
    """Router -> node: take the KV of `prompt` from the node of that name, life and address, which holds it, into the
    prefix cache. The answer is `Pulled`, or `Failed`, where some of it may have come."""

    handoff_id: Id128
    attempt: Attempt
    prompt: Prompt
    node_id: Name
    epoch: U64
    address: Name


@dataclass(frozen=True, slots=True)
class Pulled:
    """Node -> router, behind the `CacheEvents` about them: so many tokens of the pull lie verified in the prefix cache.
    `num_bytes` of them were moved, in `transfer_us` from the grant on."""

    epoch: U64
    handoff_id: Id128
    attempt: Attempt
    num_tokens: Count
    num_bytes: Count
    transfer_us: Count
