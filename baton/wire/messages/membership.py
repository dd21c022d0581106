"""The messages by which a node belongs to a router: registration, session, load, and the end.

Owns their fields, the names of a node's legs, and the identity of its control connection. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U32, U64, Bounds, Length
from baton.wire.drafts import DraftsByMethod
from baton.wire.layout import KvLayout
from baton.wire.messages.fields import Count, Name, Names, Text
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierUsages

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
LIVE_KEY_BYTES = 20


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's load, as of its last step. `num_preemptions` counts from its start. `cost`: of its steps, as far as it
    knows. `num_leased_blocks` of those that are held belong to handoffs, and maybe to requests as well. `tiers`: of its
    KV store. `drafts`: since its start."""

    num_running: Count
    num_waiting: Count
    num_free_blocks: Count
    num_cached_blocks: Count
    num_held_blocks: Count
    loop_age_s: Annotated[float, Bounds(0, 1e9)]
    num_preemptions: Count = 0
    cost: StepCost | None = None
    num_leased_blocks: Count = 0
    tiers: TierUsages = ()
    drafts: DraftsByMethod = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """Node -> router, first message of a connection.

    `epoch` is random for each life of the process. `fingerprint` names the weights and architecture. `peer_address` is
    where other nodes reach this one. `max_request_tokens` is the longest prompt plus output that the node's context and
    pool can hold. `clock` names the clock of its stamps (see `baton.runtime.clock`), "" when it has no name. `session`
    is the one that it is in, 0 for none. `tokenizer` is the digest of its tokenizer, "" when its checkpoint has none:
    masks of grammars depend on it.

    `prefers` is "" for a node that does the legs of its role. A decode node that does any leg has `PREFILL`, `DECODE`
    or `BOTH`: the legs that it is given where there is a choice. `group`: with which other nodes it is counted and
    drained, "" for none. `media`: the kinds of media that it computes. `start_ms`: what its start took but for
    imports, 0 where that is not known. `can_pull`: it takes the KV of prefixes from other nodes, see `Pull`.
    """

    role: Name
    node_id: Name
    epoch: U64
    fingerprint: Name
    layout: KvLayout
    peer_address: Name
    http_address: Name
    num_blocks: Count
    max_request_tokens: Count
    max_num_seqs: Count
    status: NodeStatus
    clock: Name
    session: U64 = 0
    tokenizer: Name = ""
    prefers: Name = ""
    group: Name = ""
    media: Names = ()
    start_ms: U32 = 0
    can_pull: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """Router -> node: registered. Another `session` than before means every earlier request of this router is void.
    `epoch` is the router's, random for each life of it: its requests begin with it."""

    session: U64
    epoch: U64 = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Router -> node: not registered, and why. A node that has never been registered ends with this message."""

    message: Text


@dataclass(frozen=True, slots=True)
class Ping:
    """Router -> node, twice a second. A node that hears none for its router time-out drops the router's requests.

    `sent` and `received`: the last numbers that the router has given to a message, and has had from the node.
    """

    session: U64
    sent: U64
    received: U64


@dataclass(frozen=True, slots=True)
class Pong:
    """Node -> router, the answer to a Ping. `sent` and `received` are the node's. `live` are the attempts that it knows
    of this router, as of then, laid end to end: 20 bytes each, the handoff id and the attempt as u32. `num_other_legs`:
    those of other routers. `num_other_prompt_tokens`: of their prompts, what is not computed yet."""

    session: U64
    sent: U64
    received: U64
    live: Annotated[bytes, Length(2**20)]
    num_other_legs: Count = 0
    num_other_prompt_tokens: Count = 0

    @property
    def live_keys(self) -> frozenset[bytes]:
        """The attempts that are alive, each as `live_key` has it."""
        return frozenset(self.live[at : at + LIVE_KEY_BYTES] for at in range(0, len(self.live), LIVE_KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Resume:
    """Both ways: messages were lost, so send again from number `first` on."""

    session: U64
    first: U64


@dataclass(frozen=True, slots=True)
class Introduce:
    """Router -> node it does not know (the router restarted): say Hello again."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Node -> router, every second, from a thread of its own."""

    epoch: U64
    status: NodeStatus


@dataclass(frozen=True, slots=True)
class Leaving:
    """Node -> router: route nothing more here; what is in flight will be finished."""

    epoch: U64


@dataclass(frozen=True, slots=True)
class Drain:
    """Router -> node: finish, and end. `starts_again`: whoever watches over the process should start it again."""

    starts_again: bool


def live_key(handoff_id: bytes, attempt: int) -> bytes:
    """The bytes by which `Pong` names an attempt: its handoff id, and its number as u32."""
    return handoff_id + attempt.to_bytes(4, "little")


def control_identity(epoch: int) -> bytes:
    """ZMQ identity of a node's control connection: a router can address every node whose epoch it has heard of."""
    return b"N" + epoch.to_bytes(8, "little")


def epoch_of_identity(identity: bytes) -> int | None:
    """The epoch in a control identity; None for any other connection."""
    is_control = len(identity) == 9 and identity[:1] == b"N"
    return int.from_bytes(identity[1:], "little") if is_control else None
