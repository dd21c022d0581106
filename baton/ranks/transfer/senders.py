"""P's end of handoffs from a node whose ranks have pools of their own: each rank sends its own bytes, straight to the
ranks that need them.

Owns what ranks were told to push and have not taken, or still read. Bounds: `_MAX_TOLD` pushes that a rank has not
taken, for each sender; what it has taken is bounded by its sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from baton.kvtransfer.messages import PeerHello, ProcessIdentity
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.transports.base import Move, Sender, Starting
from baton.kvtransfer.transports.part_registry import Reached, ranks_at
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import Broken, EndSender, Prepare, Prepared, Push, Reach, Read, Taken
from baton.wire.errors import Refused, TransferFailed
from baton.wire.kv_shard import KvShard
from baton.wire.request_key import RequestKey

_MAX_TOLD = 4
_SLOTS, _NIXL = "shm_slots", "nixl"
_PIECE_BYTES = {"nixl": 2**24}
"""How much one push is given, where a push has a fixed cost."""


class RanksSender:
    """A sender at each rank towards one receiver, as one. Ranks know it by `number`."""

    is_silent = False
    pushes_parts = False

    def __init__(
        self, lines: RankLines, number: int, piece_bytes: int, writers: Sequence[ProcessIdentity] = ()
    ) -> None:
        self.writers = writers
        self.failure = ""
        self.needs_fence = False
        self.piece_bytes = piece_bytes
        self._lines, self._number = lines, number
        self._num_ranks = len(lines.division.shards)
        self._untaken: Counter[KvShard] = Counter()
        self._unread: Counter[RequestKey] = Counter()
        self._is_closed = False

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Tell all ranks to push these blocks. False while a rank has `_MAX_TOLD` pushes that it has not taken."""
        self._lines.round()
        self.poll()
        if not moves:
            return True
        if any(count >= _MAX_TOLD for count in self._untaken.values()):
            return False
        columns = [(move.source, move.target, move.generation) for move in moves]
        sources, targets, generations = (tuple(column) for column in zip(*columns, strict=True))
        self._untaken.update(self._lines.division.shards)
        self._unread[key] += self._num_ranks
        self._lines.tell(Push(self._number, key, moves[0].index, sources, targets, generations))
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Raise `NotImplementedError`: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """Raise `TransferFailed` if a rank has reported that its sender failed."""
        if self.failure:
            raise TransferFailed(self.failure)

    def wait_on(self) -> Sequence[Any]:
        """No sockets: those of `RanksSenders.wait_on` are readable when a rank has something to say."""
        return ()

    def is_reading(self, key: RequestKey) -> bool:
        """Whether a rank may still read blocks of this handoff."""
        return self._unread[key] > 0

    def close(self) -> None:
        """Tell all ranks to end this sender."""
        if not self._is_closed:
            self._is_closed = True
            self._lines.tell(EndSender(self._number))

    @property
    def is_over(self) -> bool:
        """Whether no rank has anything more to say of it."""
        return self._is_closed and not +self._unread

    def note_taken(self, shard: KvShard) -> None:
        """Note that a rank has taken one more push."""
        self._untaken[shard] -= 1

    def note_read(self, read: Read) -> None:
        """A rank has done with some pushes."""
        self.needs_fence = self.needs_fence or read.needs_fence
        self._unread[read.key] -= read.count
        if self._unread[read.key] <= 0:
            del self._unread[read.key]


class RanksSenders:
    """Opens senders that are made of one at every rank. `counters` counts what ranks send.

    With `are_mapping`, nixl at the ranks may map the pool of a peer on their host, as devices do. Only the end of every
    such process proves then that nothing is written any more, so the peer is told of all of them.
    """

    def __init__(
        self,
        lines: RankLines,
        counters: SendingCounters,
        transports: Sequence[str],
        may_share_memory: Callable[[PeerHello], bool],
        *,
        are_mapping: bool = False,
    ) -> None:
        self._lines, self._counters, self._taken = lines, counters, transports
        self._may_share_memory, self._are_mapping = may_share_memory, are_mapping
        self._prepared: dict[KvShard, ProcessIdentity] = {}
        self._numbers = count()
        self._senders: dict[int, RanksSender] = {}
        lines.hear(Prepared, self._on_prepared)
        lines.hear(Taken, self._on_taken)
        lines.hear(Read, self._on_read)
        lines.hear(Broken, self._on_broken)
        lines.tell(Prepare(tuple(transports)))

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """Open a sender by the first transport of the peer's offer that ranks have. Raises `Refused` and `Starting`."""
        reasons = []
        for endpoint in hello.endpoints:
            name = endpoint.transport
            if name not in self._taken:
                reasons.append(f"{name:.40}: ranks of this node take {' or '.join(self._taken)}")
            elif name == _SLOTS and not self._may_share_memory(hello):
                reasons.append(f"{name}: the nodes do not share memory")
            else:
                writers = self._writers() if name == _NIXL and self._are_mapping else ()
                return name, self._opened(ranks_at(endpoint, hello.num_blocks), writers)
        raise Refused(f"no KV transport in common ({'; '.join(reasons) or 'none offered'})")

    def _writers(self) -> Sequence[ProcessIdentity]:
        """All ranks. Raises `Starting` while one of them is not ready to send."""
        if len(self._prepared) < len(self._lines.division.shards):
            raise Starting("not all ranks of this node are ready to send")
        return tuple(self._prepared.values())

    def _opened(self, to: Reached, writers: Sequence[ProcessIdentity]) -> Sender:
        number = next(self._numbers)
        piece_bytes = _PIECE_BYTES.get(to.transport, 2**20)
        sender = self._senders[number] = RanksSender(self._lines, number, piece_bytes, writers)
        self._lines.tell(Reach(number, to.transport, to.division, tuple(to.endpoints), to.num_blocks))
        return sender

    def poll(self) -> None:
        """Take what ranks report, and drop senders that are over. Raises `ChannelBroken` when a rank is gone."""
        self._lines.round()
        for number in [number for number, sender in self._senders.items() if sender.is_over]:
            del self._senders[number]

    def wait_on(self) -> Sequence[Any]:
        """The sockets of the lines to all ranks."""
        return self._lines.wait_on()

    def _on_prepared(self, shard: KvShard, prepared: Prepared) -> None:
        self._prepared[shard] = prepared.process

    def _on_taken(self, shard: KvShard, taken: Taken) -> None:
        if (sender := self._senders.get(taken.number)) is not None:
            sender.note_taken(shard)

    def _on_read(self, shard: KvShard, read: Read) -> None:
        self._counters.num_part_bytes += read.num_bytes
        if (sender := self._senders.get(read.number)) is not None:
            sender.note_read(read)

    def _on_broken(self, shard: KvShard, broken: Broken) -> None:
        if (sender := self._senders.get(broken.number)) is not None:
            sender.failure = sender.failure or broken.reason
