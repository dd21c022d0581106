"""What a transfer thread of the driver and one of each rank say to each other, where ranks have pools of their own.

Plain values over a pair of sockets (`program.channel`). The driver orders, a rank reports. A rank knows no leases,
grants or commits: it knows blocks that it may write, blocks that it is to send, and sums over blocks.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from program.channel import Channel, Message
from wire.kv_share import KvDivision
from wire.request_key import RequestKey


class Begin(Message, frozen=True):
    """Driver, first of all: where a rank listens, and with the key of which role."""

    host: str
    cluster_key: str
    role: str


class Listen(Message, frozen=True):
    """Driver: listen for blocks. Answer: `Listening`."""


class Expect(Message, frozen=True):
    """Driver: accept these blocks of a grant from now on, each once. `number`: of this order."""

    number: int
    key: RequestKey
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


class Forget(Message, frozen=True):
    """Driver: accept nothing more for this handoff. Answer: `Forgotten`."""

    key: RequestKey


class Reach(Message, frozen=True):
    """Driver: dial the ranks of a receiver, as sender `number`. `addresses`: of `division.shares`."""

    number: int
    division: KvDivision
    addresses: tuple[str, ...]


class Push(Message, frozen=True):
    """Driver: send the blocks `sources` to the blocks `targets` of that receiver, the places from `first_index` on of a
    grant. Answer: `Taken`, and later `Read`."""

    number: int
    key: RequestKey
    first_index: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    generations: tuple[int, ...]


class Part(Message, frozen=True):
    """Driver: end the sender `number`. Answer: `Read` for all that it was told to push, once that is over."""

    number: int


class AddUp(Message, frozen=True):
    """Driver: add up these blocks (see `StrandTotals`). Answer: `Totals`."""

    number: int
    block_ids: tuple[int, ...]


class Listening(Message, frozen=True):
    """Rank: it listens there."""

    address: str


class Arrived(Message, frozen=True):
    """Rank: its bytes of these places of a grant are in its pool, as `Expect` of that number allowed. `num_bytes`: what
    it has received since it said so last."""

    number: int
    key: RequestKey
    first_index: int
    count: int
    num_bytes: int


class Forgotten(Message, frozen=True):
    """Rank: it writes nothing more for this handoff."""

    key: RequestKey


class Taken(Message, frozen=True):
    """Rank: the sender `number` takes another `Push`."""

    number: int


class Read(Message, frozen=True):
    """Rank: so many pushes of a handoff by the sender `number` are over, and do not read the pool any more. `num_bytes`
    have left by them."""

    number: int
    key: RequestKey
    count: int
    num_bytes: int


class Broken(Message, frozen=True):
    """Rank: the sender `number` is of no use any more."""

    number: int
    reason: str


class Totals(Message, frozen=True):
    """Rank: the answer to `AddUp` of that number."""

    number: int
    totals: tuple[int, ...]


Order: TypeAlias = Begin | Listen | Expect | Forget | Reach | Push | Part | AddUp
Report: TypeAlias = Listening | Arrived | Forgotten | Taken | Read | Broken | Totals


class TransferChannel(Channel[Order | Report]):
    """One end of the pair."""

    decoder: ClassVar = msgspec.msgpack.Decoder(Order | Report)
