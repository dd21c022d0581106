"""D's end of handoffs to a node whose ranks have pools of their own: each rank listens, and writes its own bytes.

Owns which blocks have arrived at all ranks, and which handoffs a rank has not forgotten yet: until all have, blocks of
a revoked handoff may still be written (`Receiver.is_writing`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvtransfer.incoming_handoffs import ReceivingCounters
from kvtransfer.messages import RANK_ENDPOINTS, Endpoint, RankEndpoints
from kvtransfer.ranks.lines import RankLines
from kvtransfer.ranks.messages import Arrived, Expect, Forget, Forgotten, Listen, Listening
from kvtransfer.transports import tcp_zmq
from kvtransfer.transports.base import BlocksArrived
from kvtransfer.write_proof import WriteProof
from wire.errors import InvalidSetting
from wire.kv_share import KvShare
from wire.request_key import RequestKey

_LISTEN_S = 60.0
_LOOK_S = 0.05


@dataclass(slots=True)
class _Expected:
    """A grant. `ranks`: how many ranks have each of its blocks."""

    number: int
    ranks: Counter[int] = field(default_factory=Counter)


class RanksReceiver:
    """See `Receiver`. Counts what ranks receive in `counters`. Raises `InvalidSetting` when a rank cannot listen."""

    write_proof = WriteProof.OWN_HANDS
    is_silent = False
    is_ready = True

    def __init__(self, lines: RankLines, counters: ReceivingCounters) -> None:
        self._lines, self._counters = lines, counters
        self._shares = lines.division.shares
        self._numbers = count()
        self._expected: dict[RequestKey, _Expected] = {}
        self._forgetting: dict[RequestKey, set[KvShare]] = {}
        self._news: list[BlocksArrived] = []
        self._addresses: dict[KvShare, str] = {}
        lines.hear(Listening, self._on_listening)
        lines.hear(Arrived, self._on_arrived)
        lines.hear(Forgotten, self._on_forgotten)
        self._endpoint = self._opened()

    @property
    def endpoint(self) -> Endpoint:
        """Where each rank listens."""
        return self._endpoint

    def wait_on(self) -> Sequence[Any]:
        """See `Receiver.wait_on`."""
        return self._lines.wait_on()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._expected[key] = _Expected(next(self._numbers))
        self._lines.tell(Expect(self._expected[key].number, key, tuple(block_ids), tuple(generations)))

    def forget(self, key: RequestKey) -> None:
        """See `Receiver.forget`."""
        if self._expected.pop(key, None) is not None:
            self._forgetting[key] = set(self._shares)
            self._lines.tell(Forget(key))

    def is_writing(self, key: RequestKey) -> bool:
        """See `Receiver.is_writing`."""
        return key in self._forgetting

    def poll(self) -> None:
        """See `Receiver.poll`. Raises `ChannelBroken` when a rank is gone."""
        self._lines.round()

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """See `Receiver.take_arrivals`."""
        news, self._news = self._news, []
        return [each for each in news if each.key in self._expected]

    def fence(self) -> bool:
        """Nobody but the ranks writes."""
        return True

    def close(self) -> None:
        """Nothing: who opened the lines closes them."""

    def _opened(self) -> Endpoint:
        self._lines.tell(Listen())
        deadline_s = time.monotonic() + _LISTEN_S
        while len(self._addresses) < len(self._shares):
            if time.monotonic() > deadline_s:
                num_missing = len(self._shares) - len(self._addresses)
                raise InvalidSetting(f"{num_missing} ranks of this node do not listen after {_LISTEN_S:g} s")
            self._lines.wait(_LOOK_S)
            self._lines.round()
        addresses = tuple(self._addresses[share] for share in self._shares)
        return Endpoint(tcp_zmq.NAME, "", RANK_ENDPOINTS.encode(RankEndpoints(self._lines.division, addresses)))

    def _on_listening(self, share: KvShare, listening: Listening) -> None:
        self._addresses[share] = listening.address

    def _on_arrived(self, share: KvShare, arrived: Arrived) -> None:
        self._counters.num_part_bytes += arrived.num_bytes
        expected = self._expected.get(arrived.key)
        if expected is None or expected.number != arrived.number:
            return
        for index in range(arrived.first_index, arrived.first_index + arrived.count):
            expected.ranks[index] += 1
            if expected.ranks[index] == len(self._shares):
                self._news.append(BlocksArrived(arrived.key, index, 1))

    def _on_forgotten(self, share: KvShare, forgotten: Forgotten) -> None:
        missing = self._forgetting[forgotten.key]
        missing.discard(share)
        if not missing:
            del self._forgetting[forgotten.key]
