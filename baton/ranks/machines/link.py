"""What a driver and the machines that its other ranks run on say to each other.

Owns the messages of this link and their bounds. It is a ZMQ connection of its own, from DEALER to ROUTER, encrypted and
authenticated by the cluster key as all others are (`baton.wire.links`), and carries what driver and rank on one machine
say over pairs of sockets: a *lane* is one such pair, cut in the middle. `epoch` names one life of the driver; what
comes with another is not for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, Bounds, Codec, Length
from baton.wire.kv_shard import MAX_RANKS

MAX_DATA_BYTES = 2**18
BEAT_S = 0.5
SILENCE_S = 10.0
"""Who has said nothing for so long is taken for gone. A death is noticed by its connection, at once."""
ORDERS, RECEIVING, SENDING = range(3)
"""The lanes of a rank: the driver's orders, and what its transfer threads are told."""
NUM_LANES = 3
Number = Annotated[int, Bounds(1, MAX_RANKS - 1)]
_Lane = Annotated[int, Bounds(0, NUM_LANES - 1)]
_Text = Annotated[str, Length(1000)]
_Numbers = Annotated[tuple[Number, ...], Length(MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class Offer:
    """Machine, every `BEAT_S` until it is taken: ranks may run on it. The rest as in
    `baton.ranks.executor.spread.Machine`; `num_threads`: for all its ranks."""

    host: _Text
    model: _Text
    num_threads: Annotated[int, Bounds(1, 2**16)]
    trusts_remote_code: bool


@dataclass(frozen=True, slots=True)
class Take:
    """Driver: run these ranks."""

    epoch: U64
    numbers: _Numbers


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Driver: it needs no more machines, or not this one."""

    reason: _Text


@dataclass(frozen=True, slots=True)
class Data:
    """Driver or machine: bytes of a lane."""

    epoch: U64
    number: Number
    lane: _Lane
    data: Annotated[bytes, Length(MAX_DATA_BYTES)]


@dataclass(frozen=True, slots=True)
class Closed:
    """Driver or machine: nothing more comes by this lane."""

    epoch: U64
    number: Number
    lane: _Lane


@dataclass(frozen=True, slots=True)
class Ended:
    """Machine: the process of a rank has ended, in words."""

    epoch: U64
    number: Number
    how: _Text


@dataclass(frozen=True, slots=True)
class Beat:
    """Driver or machine, every `BEAT_S` seconds: it lives. `stopped`: the machine's ranks that are stopped."""

    epoch: U64
    stopped: _Numbers


@dataclass(frozen=True, slots=True)
class Kill:
    """Driver: end a rank now."""

    epoch: U64
    number: Number


@dataclass(frozen=True, slots=True)
class Leave:
    """Driver: its life ends, and with it that of all ranks."""

    epoch: U64


TO_DRIVER = Codec(Offer, Data, Closed, Ended, Beat)
TO_MACHINE = Codec(Take, TurnAway, Data, Closed, Beat, Kill, Leave)
