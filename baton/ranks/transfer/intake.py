"""What one rank receives by one transport, as it is told and as it reports.

Owns the receiver, what it was told to expect and what of that has been reported, and the endpoint that was reported
last. Decides nothing: the driver does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.kvtransfer.messages import Endpoint, RankEndpoint
from baton.kvtransfer.transports.part_registry import PartReceiver
from baton.ranks.transfer.messages import Arrived, Expect, Forgotten, Listening, Report
from baton.wire.request_key import RequestKey


class Intake:
    """The blocks that a rank receives by one transport."""

    def __init__(self, transport: str, receiver: PartReceiver) -> None:
        self._transport, self._receiver = transport, receiver
        self._expected: dict[RequestKey, int] = {}
        self._num_told_bytes = 0
        self._told: Endpoint | None = None

    def wait_on(self) -> Sequence[Any]:
        """Sockets that are readable when there is something to receive."""
        return self._receiver.wait_on()

    def expect(self, order: Expect) -> None:
        """Accept these blocks of a handoff from now on."""
        self._expected[order.key] = order.number
        self._receiver.expect(order.key, order.block_ids, order.generations)

    def forget(self, key: RequestKey) -> Report:
        """Accept nothing more for this handoff. Returns the report of that."""
        self._expected.pop(key, None)
        self._receiver.forget(key)
        return Forgotten(self._transport, key)

    def fence(self, addresses: Sequence[str]) -> None:
        """End the endpoint, if it is one of these. That it is done shows in the one that is reported next."""
        if self._told is not None and self._told.address in addresses:
            self._receiver.fence()

    def work(self) -> Iterator[Report]:
        """Take what has arrived; what there is to report."""
        self._receiver.poll()
        endpoint = self._receiver.endpoint
        if endpoint != self._told:
            self._told = endpoint
            place = RankEndpoint(endpoint.address, endpoint.details)
            yield Listening(self._transport, place, self._receiver.is_ready)
        for each in self._receiver.take_arrivals():
            num_bytes = self._receiver.num_bytes - self._num_told_bytes
            self._num_told_bytes += num_bytes
            number = self._expected[each.key]
            yield Arrived(self._transport, number, each.key, each.first_index, each.count, num_bytes)

    def close(self) -> None:
        """Close the receiver."""
        self._receiver.close()
