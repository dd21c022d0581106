"""What P and D say to each other about slots, and the bounds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.kvtransfer.messages import HandoffName
from baton.wire.codec import BlockIds, Bounds, Codec, Length, U64s
from baton.wire.kv_shard import KvShard

NAME = "shm_slots"
MAX_SLOT_BLOCKS = 1_024
MAX_SLOTS = 1_024
MAX_FRAME_BYTES = 2**17


@dataclass(frozen=True, slots=True)
class RingHello:
    """P -> D, first message of a connection: this is my ring. `source`: its blocks are what this rank has of them for
    the rank that it sends to; None: all of them."""

    name: Annotated[str, Length(64)]
    num_slots: Annotated[int, Bounds(1, MAX_SLOTS)]
    slot_blocks: Annotated[int, Bounds(1, MAX_SLOT_BLOCKS)]
    block_bytes: Annotated[int, Bounds(1, 2**40)]
    source: KvShard | None = None


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """P -> D, `number` counting from 0: `slot` holds these blocks of the grant, in this order."""

    number: Annotated[int, Bounds(0, 2**62)]
    slot: Annotated[int, Bounds(0, MAX_SLOTS - 1)]
    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """D -> P: the slot of this batch is not read any more, whether its blocks were wanted or not."""

    number: Annotated[int, Bounds(0, 2**62)]


@dataclass(frozen=True, slots=True)
class RingEnd:
    """Sender or receiver: the ring is no longer used. Also the answer to whatever comes without a ring."""

    reason: Annotated[str, Length(1024)]


TO_RECEIVER = Codec(RingHello, SlotBatch, RingEnd)
TO_SENDER = Codec(SlotTaken, RingEnd)
