"""What the driver of an engine and its other ranks say to each other: plain values over a pair of sockets.

Owns the messages; how they travel is `baton.runtime.channel`, and to another machine `baton.ranks.machines.lanes`.
Every send and every receive has a deadline, but for a rank's wait for its next order: that ends with the driver.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

import baton.runtime.channel
from baton.runtime.channel import Message

Setting: TypeAlias = str | int | float | bool


class Begin(Message, frozen=True):
    """Driver: the rank is process `number` of those of `settings`, which are the fields of `EngineSettings`.

    The ranks of a group know each other by `nonce`. `stage_host`: the address of this machine at which it listens for
    the others of its stage; `host`: for a stage whose ranks are on another machine. `is_before_afar` and
    `is_next_afar`: whether the passage from the stage before, and to the next, is without shared memory. Such a passage
    leads to another machine, or from device to device. `fingerprint`: of the driver's checkpoint, "" where the rank
    reads the same files.
    """

    number: int
    settings: dict[str, Setting]
    nonce: bytes
    num_threads: int
    stage_host: str
    host: str
    is_before_afar: bool
    is_next_afar: bool
    fingerprint: str


class Meet(Message, frozen=True):
    """Driver: all ranks are here, and meet the others of their groups now."""


class Posted(Message, frozen=True):
    """A rank, and the driver to every other rank of the same group: an entry for those that form this group with it. It
    says where the rank listens."""

    group: str
    key: str
    value: bytes


class UsePool(Message, frozen=True):
    """Driver: the KV pool has `num_blocks` blocks. A descriptor comes with it, of a file of `num_bytes` bytes.

    With `num_bytes` 0 each rank has a pool of its own, and two descriptors of sockets come instead. By the first the
    rank is told what to receive of other nodes' KV, and by the second what to send. Passages in shared memory have two
    descriptors each, of one end and of the memory. A later stage gets the receiver's end of the passage from the stage
    before. An earlier stage gets the sender's end of the passage to the next.
    """

    num_blocks: int
    num_bytes: int


class Share(Message, frozen=True):
    """One sequence's part of a step, as `SequenceShare`. `blocks`: its block table, int32."""

    start: int
    num_tokens: int
    blocks: bytes


class Compute(Message, frozen=True):
    """Driver: compute a step. token_ids: int64, all sequences one after another. `read` and `due`: the rows,
    int64, of which logits are wanted, in this order; those that are read by their kinds. `copies`: blocks of pools that
    ranks have of their own, to be copied before; int64, from and to. `sources`: see `StepInputs`, int64; nothing where
    no token is pending. `is_recorded`: the step is a replay of a graph."""

    shares: tuple[Share, ...]
    token_ids: bytes
    read: tuple[bytes, ...]
    due: bytes
    copies: bytes = b""
    sources: bytes = b""
    is_recorded: bool = False


class Evicted(Message, frozen=True):
    """Driver: the prefix cache does not find these blocks any more by these hashes. Their content is there until a step
    or a load writes into them."""

    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]


class Save(Message, frozen=True):
    """Driver: the next step writes into these blocks. What an evicted one holds goes to the rank's tiers. The rank says
    when that is done (`Saved`)."""

    number: int
    block_ids: tuple[int, ...]


class SaveLast(Message, frozen=True):
    """Driver: nothing is computed any more. For so many seconds the rank's tiers are to keep these blocks, of which
    the first `num_reused` were used again. The rank says when that is done (`Saved`)."""

    number: int
    seconds: float
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    num_reused: int


class Drop(Message, frozen=True):
    """Driver: another node may write into these blocks, at any moment. What they hold is lost."""

    block_ids: tuple[int, ...]


class BeginLoad(Message, frozen=True):
    """Driver: load the blocks of these hashes from the rank's tiers, each into the block at the same place."""

    load: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


class EndLoad(Message, frozen=True):
    """Driver: write nothing more for this load."""

    load: int


class Stop(Message, frozen=True):
    """Driver: the rank has to end."""


class Here(Message, frozen=True):
    """Rank: it runs, and has the checkpoint."""


class Loaded(Message, frozen=True):
    """Rank: its share of the weights is there."""


class Room(Message, frozen=True):
    """Rank: its device has room for a pool of so many blocks. Only where that is measured."""

    num_blocks: int


class Came(Message, frozen=True):
    """Rank: so many blocks of a load, from the first one on, are in its pool and were found right. `has_ended`: it
    writes nothing more for it; said once, at the latest after `EndLoad`. `is_damaged`: the next block was wrong."""

    load: int
    num_blocks: int
    has_ended: bool
    is_damaged: bool


class Saved(Message, frozen=True):
    """Rank: it has carried out this `Save` or `SaveLast`, and reads its blocks no more."""

    number: int


class Ready(Message, frozen=True):
    """Rank: it computes what it is told from now on."""


class Failed(Message, frozen=True):
    """Rank: it ends. `is_own`: not only because another rank did."""

    reason: str
    is_own: bool


Order: TypeAlias = Begin | Meet | UsePool | Compute | Evicted | Save | SaveLast | Drop | BeginLoad | EndLoad | Stop
Report: TypeAlias = Here | Loaded | Room | Ready | Came | Saved | Failed


class Channel(baton.runtime.channel.Channel[Order | Report | Posted]):
    """One end of the sockets between the driver and a rank."""

    decoder: ClassVar = msgspec.msgpack.Decoder(Order | Report | Posted)
