"""What the two sides of a pair say to each other over ZMQ, and the bounds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.kvtransfer.messages import HandoffName
from baton.wire.codec import BlockIds, Bounds, Codec, Length, U64s

NAME = "nccl"
MAX_FRAME_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class PairHello:
    """Sender -> receiver, first message of a connection: form a group with me."""

    backend: Annotated[str, Length(16)]
    block_bytes: Annotated[int, Bounds(1, 2**40)]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Sender or receiver, while the group is formed: an entry of its store."""

    key: Annotated[str, Length(256)]
    value: Annotated[bytes, Length(2**12)]


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Sender -> receiver: message `number` (from 0) of the group holds these blocks of the grant, in this order."""

    number: Annotated[int, Bounds(0, 2**62)]
    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s


@dataclass(frozen=True, slots=True)
class PairAlive:
    """Sender -> receiver, when it has had nothing to send for a while."""


@dataclass(frozen=True, slots=True)
class PairEnd:
    """Sender or receiver: this side has ended the pair. Also the answer to whatever comes without a pair."""

    reason: Annotated[str, Length(1024)]


TO_RECEIVER = Codec(PairHello, StoreEntry, BlockBatch, PairAlive, PairEnd)
TO_SENDER = Codec(StoreEntry, PairEnd)
