"""What a transfer thread of the driver and one of each rank say to each other, where ranks have pools of their own.

Plain values over a pair of sockets (`baton.runtime.channel`). The driver orders, a rank reports. A rank knows no
leases, grants or commits: it knows blocks that it may write, blocks that it is to send, and sums over blocks.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import msgspec

from baton.kvtransfer.messages import ProcessIdentity, RankEndpoint
from baton.runtime.channel import Channel, Message
from baton.wire.kv_shard import KvDivision
from baton.wire.request_key import RequestKey


class Begin(Message, frozen=True):
    """Driver, first of all: where a rank listens, and with the key of which role."""

    host: str
    cluster_key: str
    role: str


class Listen(Message, frozen=True):
    """Driver: open the receiving ends of these transports. Answer: `Listening` for each."""

    transports: tuple[str, ...]


class Prepare(Message, frozen=True):
    """Driver: be ready to send by these transports. Answer: `Prepared`."""

    transports: tuple[str, ...]


class Prepared(Message, frozen=True):
    """Rank: it is ready to send. `process`: it is this one that writes into peers' pools."""

    process: ProcessIdentity


class Expect(Message, frozen=True):
    """Driver: accept these blocks of a grant from now on, each once, by one transport. `number`: of this order."""

    transport: str
    number: int
    key: RequestKey
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


class Forget(Message, frozen=True):
    """Driver: accept nothing more for this handoff. Answer: `Forgotten`."""

    transport: str
    key: RequestKey


class Fence(Message, frozen=True):
    """Driver: whoever has one of these endpoints of a transport ends it, so that no peer writes by it any more. Answer:
    `Listening` with another one, once that is so."""

    transport: str
    addresses: tuple[str, ...]


class Reach(Message, frozen=True):
    """Driver: dial the ranks of a receiver with `num_blocks` blocks by a transport, as sender `number`. `ranks`: of
    `division.shards`."""

    number: int
    transport: str
    division: KvDivision
    ranks: tuple[RankEndpoint, ...]
    num_blocks: int


class Push(Message, frozen=True):
    """Driver: send the blocks `sources` to the blocks `targets` of that receiver, the places from `first_index` on of a
    grant. Answer: `Taken`, and later `Read`."""

    number: int
    key: RequestKey
    first_index: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    generations: tuple[int, ...]


class EndSender(Message, frozen=True):
    """Driver: end the sender `number`. Answer: `Read` for all that it was told to push, once that is over."""

    number: int


class AddUp(Message, frozen=True):
    """Driver: add up these blocks (see `StrandTotals`). Answer: `Totals`."""

    number: int
    block_ids: tuple[int, ...]


class Listening(Message, frozen=True):
    """Rank: this is its endpoint of a transport from now on, which can be offered if it `is_ready`. Nothing comes by an
    earlier one any more."""

    transport: str
    endpoint: RankEndpoint
    is_ready: bool


class Arrived(Message, frozen=True):
    """Rank: its bytes of these places of a grant are in its pool, as `Expect` of that number allowed. `num_bytes`: what
    it has received since it said so last."""

    transport: str
    number: int
    key: RequestKey
    first_index: int
    count: int
    num_bytes: int


class Forgotten(Message, frozen=True):
    """Rank: it writes nothing more for this handoff."""

    transport: str
    key: RequestKey


class Taken(Message, frozen=True):
    """Rank: the sender `number` takes another `Push`."""

    number: int


class Read(Message, frozen=True):
    """Rank: so many pushes of a handoff by the sender `number` are over, and do not read the pool any more. `num_bytes`
    have left by them. `needs_fence`: see `Sender.needs_fence`."""

    number: int
    key: RequestKey
    count: int
    num_bytes: int
    needs_fence: bool = False


class Broken(Message, frozen=True):
    """Rank: the sender `number` is of no use any more."""

    number: int
    reason: str


class Totals(Message, frozen=True):
    """Rank: the answer to `AddUp` of that number."""

    number: int
    totals: tuple[int, ...]


Order: TypeAlias = Begin | Listen | Prepare | Expect | Forget | Fence | Reach | Push | EndSender | AddUp
Report: TypeAlias = Prepared | Listening | Arrived | Forgotten | Taken | Read | Broken | Totals


class TransferChannel(Channel[Order | Report]):
    """One end of the sockets between a driver's transfer thread and a rank."""

    decoder: ClassVar = msgspec.msgpack.Decoder(Order | Report)
