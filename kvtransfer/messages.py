"""Messages between a prefill node (P, the sender of KV) and a decode node (D, its receiver).

D dials P's peer address, so one connection carries all handoffs of the pair. `docs/protocol.md` gives the order,
the states and the answer to each message. A handoff is named by (handoff_id, attempt), a life of a node by its epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, BlockIds, Bounds, Codec, Id128, Length, U64s
from baton.wire.kv_shard import MAX_RANKS, KvDivision
from baton.wire.layout import KvLayout
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey

_Name = Annotated[str, Length(256)]
_Text = Annotated[str, Length(1024)]
_Count = Annotated[int, Bounds(0, 2**40)]
_Attempt = Annotated[int, Bounds(1, 1000)]
_Round = Annotated[int, Bounds(0, 1000)]


@dataclass(frozen=True, slots=True)
class HandoffName:
    """The `RequestKey` of a handoff, as it is on the wire."""

    handoff_id: Id128
    attempt: _Attempt

    @property
    def key(self) -> RequestKey:
        """This name in the form that is used inside a program."""
        return RequestKey(self.handoff_id, self.attempt)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process to others on its host. Equal `host` means the same kernel, process table and /dev/shm."""

    host: _Name
    pid: _Count
    start_ticks: _Count


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a receiver's pool by one transport. `address` is a segment name or a socket address; `details` holds
    what else that transport needs, in its own encoding.
    """

    transport: _Name
    address: _Name
    details: Annotated[bytes, Length(2**22)] = b""

    @property
    def has_ranks(self) -> bool:
        """Whether the node has ranks with pools of their own. The endpoint has no address then, and `RankEndpoints` as
        its details."""
        return not self.address and bool(self.details)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """How to reach the pool of one rank: see `Endpoint`."""

    address: _Name
    details: Annotated[bytes, Length(2**16)] = b""


@dataclass(frozen=True, slots=True)
class RankEndpoints:
    """The `details` of the endpoint of a node whose ranks have pools of their own: that of each of them, in the order
    of `division.shards`."""

    division: KvDivision
    ranks: Annotated[tuple[RankEndpoint, ...], Length(MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class PeerHello:
    """D -> P, first message of a connection. `endpoints` are in D's order of preference.

    D sends it again on the same connection when an endpoint has changed. The earlier endpoints and all earlier grants
    of D are then void. `sender_epoch`: the epoch of P that D means to dial.
    """

    node_id: _Name
    epoch: U64
    sender_epoch: U64
    fingerprint: _Name
    layout: KvLayout
    num_blocks: _Count
    checksum: Annotated[str, Length(16)]
    process: ProcessIdentity
    endpoints: Annotated[tuple[Endpoint, ...], Length(8)]


@dataclass(frozen=True, slots=True)
class PeerWelcome:
    """P -> D: the handshake succeeded; P will push by `transport`. `writers` are the processes that write: of a node
    whose ranks have pools of their own all of these."""

    node_id: _Name
    epoch: U64
    transport: _Name
    writers: Annotated[tuple[ProcessIdentity, ...], Length(MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """P -> D: the two nodes do not fit together, or P does not know this connection because it restarted."""

    message: _Text


@dataclass(frozen=True, slots=True)
class Grant:
    """D -> P: P may write these blocks. D has the KV of the first `num_cached_tokens` of `num_tokens` tokens.

    `block_ids` with `generations` are D's blocks for the rest, in sequence order; the last may be filled in part.
    """

    handoff: HandoffName
    receiver_epoch: U64
    sender_epoch: U64
    num_tokens: _Count
    num_cached_tokens: _Count
    prompt_digest: Id128
    block_ids: BlockIds
    generations: U64s


@dataclass(frozen=True, slots=True)
class Pushed:
    """P -> D: the blocks of the grant at `indexes` are written. Sent where D cannot notice by itself that blocks
    arrive, and of a prefix that D takes block by block: only then with `checksums`, one for each, as in `Commit`.
    """

    handoff: HandoffName
    indexes: BlockIds
    checksums: U64s = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """P -> D: every granted block was pushed. `checksums` cover each block's bytes as P read them; their kind was
    agreed in the handshake.

    `round` counts from 0; each `Resend` asks for the next. `firsts` are the first tokens that P sampled (and has sent
    to the router already), one of each choice in the order of the legs. `exposed_us`: microseconds by P's clock since
    the prompt was computed. `num_drafted`: of the tokens, from the first on, how many have KV of the draft in the
    blocks, too.
    """

    handoff: HandoffName
    receiver_epoch: U64
    sender_epoch: U64
    num_tokens: _Count
    prompt_digest: Id128
    generations: U64s
    checksums: U64s
    firsts: Annotated[tuple[TokenEvent, ...], Length(1025)]
    round: _Round
    exposed_us: _Count
    num_drafted: _Count = 0


@dataclass(frozen=True, slots=True)
class Resend:
    """D -> P: the blocks of the grant at `indexes` arrived damaged; push them again and commit with `round`."""

    handoff: HandoffName
    round: _Round
    indexes: BlockIds


@dataclass(frozen=True, slots=True)
class Release:
    """D -> P: D has all KV that it needs; P may release its blocks into its prefix cache."""

    handoff: HandoffName


@dataclass(frozen=True, slots=True)
class Revoke:
    """D -> P: the grant is void. P answers `Revoked` when none of its writes is or will be in flight."""

    handoff: HandoffName


@dataclass(frozen=True, slots=True)
class Revoked:
    """P -> D: no write of this handoff is or will be in flight. It answers Revoke, or comes unasked when P cancelled.

    `request_ended`: nothing failed; P's first token already ended the request. `needs_fence`: P writes nothing more,
    but what it wrote may still land, so D must fence its receiver before it uses the blocks again.
    """

    handoff: HandoffName
    reason: _Text
    request_ended: bool
    needs_fence: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """P -> D and D -> P, every third of the lease: these handoffs are alive at the node that sends this."""

    handoffs: tuple[HandoffName, ...]


RANK_ENDPOINTS = Codec(RankEndpoints)
RECEIVER_TO_SENDER = Codec(PeerHello, Grant, Resend, Release, Revoke, Renew)
SENDER_TO_RECEIVER = Codec(PeerWelcome, PeerRefusal, Pushed, Commit, Revoked, Renew)
