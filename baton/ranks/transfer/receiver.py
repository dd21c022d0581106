"""D's end of handoffs to a node whose ranks have pools of their own, by one transport: each rank receives its bytes.

Owns which blocks have arrived at all ranks, which handoffs a rank has not forgotten yet (until all have, blocks of a
revoked handoff may still be written: `Receiver.is_writing`), and the endpoint that is made of those of the ranks.

Where peers write by themselves (nixl), an endpoint proves something when it has ended: nothing comes by it any more. So
that of the node ends only when those of all its ranks have: as soon as one has changed, the others are fenced, and
until the last of them has changed too the node keeps its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.messages import RANK_ENDPOINTS, Endpoint, RankEndpoint, RankEndpoints
from baton.kvtransfer.transports.base import BlocksArrived
from baton.kvtransfer.write_proof import WriteProof
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import Arrived, Expect, Fence, Forget, Forgotten, Listen, Listening
from baton.wire.errors import InvalidSetting
from baton.wire.kv_shard import KvShard
from baton.wire.request_key import RequestKey

_LISTEN_S = 60.0
_LOOK_S = 0.05
_STARTING = "starting"
_PROOFS = {"nixl": WriteProof.ENDPOINT_ENDED}
"""Of the transports by which peers write; by all others ranks do so themselves."""
_PROOFS_ON_DEVICE = {"nixl": WriteProof.BOTH_ENDED}
"""A peer on this host may have mapped a rank's pool."""


@dataclass(slots=True)
class _Expected:
    """A grant. `ranks`: how many ranks have each of its blocks."""

    number: int
    ranks: Counter[int] = field(default_factory=Counter)


class RanksReceiver:
    """A transport's receivers at all ranks, as one. `counters` counts what ranks receive; `is_device`: their pools are
    on devices. `open_ranks_receivers` makes it."""

    is_silent = False

    def __init__(
        self, transport: str, lines: RankLines, counters: ReceivingCounters, *, is_device: bool = False
    ) -> None:
        proofs = _PROOFS_ON_DEVICE if is_device else _PROOFS
        self.write_proof = proofs.get(transport, WriteProof.OWN_HANDS)
        self._transport, self._lines, self._counters = transport, lines, counters
        self._shards = lines.division.shards
        self._numbers = count()
        self._expected: dict[RequestKey, _Expected] = {}
        self._forgetting: dict[RequestKey, set[KvShard]] = {}
        self._news: list[BlocksArrived] = []
        self._places: dict[KvShard, Listening] = {}
        self._is_fencing = False
        self._offered: Mapping[KvShard, RankEndpoint] = {}
        self._endpoint = Endpoint(transport, _STARTING)

    @property
    def has_begun(self) -> bool:
        """Whether every rank has said where it is."""
        return len(self._places) == len(self._shards)

    @property
    def is_ready(self) -> bool:
        """Whether all ranks listen, and none is being fenced."""
        return bool(self._offered) and not self._is_fencing

    @property
    def endpoint(self) -> Endpoint:
        """The endpoints of all ranks, as one; without details while one of them starts again."""
        return self._endpoint

    def wait_on(self) -> Sequence[Any]:
        """The sockets of the lines to all ranks."""
        return self._lines.wait_on()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Tell all ranks to accept these blocks."""
        expected = self._expected[key] = _Expected(next(self._numbers))
        self._lines.tell(Expect(self._transport, expected.number, key, tuple(block_ids), tuple(generations)))

    def forget(self, key: RequestKey) -> None:
        """Tell all ranks to accept nothing more; until all have confirmed it, blocks may still be written."""
        if self._expected.pop(key, None) is not None:
            self._forgetting[key] = set(self._shards)
            self._lines.tell(Forget(self._transport, key))

    def is_writing(self, key: RequestKey) -> bool:
        """Whether a rank has not confirmed yet that it forgot this handoff."""
        return key in self._forgetting

    def poll(self) -> None:
        """Take what ranks report. Raises `ChannelBroken` when a rank is gone."""
        self._lines.round()

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """Blocks that have arrived at all ranks since the last call."""
        news, self._news = self._news, []
        return [each for each in news if each.key in self._expected]

    def fence(self) -> bool:
        """Begin to fence all ranks, once, where peers write by themselves. The endpoint changes when it is done."""
        if self.write_proof is WriteProof.OWN_HANDS:
            return True
        if self._is_fencing or not self._offered:
            return False
        self._is_fencing = True
        self._lines.tell(Fence(self._transport, tuple(each.address for each in self._offered.values())))
        return True

    def close(self) -> None:
        """Do nothing: who opened the lines closes them."""

    def on_listening(self, shard: KvShard, listening: Listening) -> None:
        """A rank has an endpoint, the first or another one."""
        self._places[shard] = listening
        if not self._offered:
            self._offer()
        elif listening.endpoint != self._offered[shard]:
            self.fence()
            if not any(self._places[each].endpoint == was for each, was in self._offered.items()):
                self._is_fencing, self._offered = False, {}
                self._endpoint = Endpoint(self._transport, _STARTING)
                self._offer()

    def _offer(self) -> None:
        if self.has_begun and all(place.is_ready for place in self._places.values()):
            self._offered = {shard: self._places[shard].endpoint for shard in self._shards}
            ranks = RankEndpoints(self._lines.division, tuple(self._offered.values()))
            self._endpoint = Endpoint(self._transport, "", RANK_ENDPOINTS.encode(ranks))

    def on_arrived(self, shard: KvShard, arrived: Arrived) -> None:
        """Note that a rank has its bytes of some blocks."""
        self._counters.num_part_bytes += arrived.num_bytes
        expected = self._expected.get(arrived.key)
        if expected is None or expected.number != arrived.number:
            return
        for index in range(arrived.first_index, arrived.first_index + arrived.count):
            expected.ranks[index] += 1
            if expected.ranks[index] == len(self._shards):
                self._news.append(BlocksArrived(arrived.key, index, 1))

    def on_forgotten(self, shard: KvShard, forgotten: Forgotten) -> None:
        """A rank writes nothing more for a handoff."""
        missing = self._forgetting[forgotten.key]
        missing.discard(shard)
        if not missing:
            del self._forgetting[forgotten.key]


def open_ranks_receivers(
    lines: RankLines, counters: ReceivingCounters, transports: Sequence[str], *, is_device: bool = False
) -> Sequence[RanksReceiver]:
    """Receivers by these transports, the preferred one first. Raises `InvalidSetting` when a rank does not listen."""
    receivers = {name: RanksReceiver(name, lines, counters, is_device=is_device) for name in transports}
    lines.hear(Listening, lambda shard, report: receivers[report.transport].on_listening(shard, report))
    lines.hear(Arrived, lambda shard, report: receivers[report.transport].on_arrived(shard, report))
    lines.hear(Forgotten, lambda shard, report: receivers[report.transport].on_forgotten(shard, report))
    lines.tell(Listen(tuple(transports)))
    deadline_s = time.monotonic() + _LISTEN_S
    while not all(receiver.is_ready for receiver in receivers.values()):
        if time.monotonic() > deadline_s:
            raise InvalidSetting(f"not all ranks of this node listen after {_LISTEN_S:g} s")
        lines.round()
        lines.wait(_LOOK_S)
    return list(receivers.values())
