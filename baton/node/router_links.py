"""The routers that a node serves, with a connection and a session to each.

Owns which request is whose. A request belongs to the router that has sent it, whose epoch its id begins with; whatever
is said of it goes to that router alone. A router has no say about requests of another one, and when one is lost, or
starts again, only its own requests are void. All of them are told what the node has cached, and when it leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from baton.engine.scheduler.reading import RowsRead
from baton.node.borrower import Arrived
from baton.node.router_link import RouterLink
from baton.wire.errors import BatonError, InvalidMessage, InvalidSetting, Refused
from baton.wire.messages.legs import Decode, HandOver, Prefill
from baton.wire.messages.membership import Drain
from baton.wire.messages.output import TokenEvent
from baton.wire.messages.prefixes import Lend
from baton.wire.request_key import OWNER_BYTES, RequestKey

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heard:
    """The messages of one router. `void`: how the ids of those of its requests begin that are void now; None: none are.
    It comes before `requests`."""

    link: RouterLink
    requests: Sequence[Any]
    void: bytes | None = None


class RouterLinks:
    """All routers of a node, as the engine loop sees them. `links` has at least one."""

    def __init__(self, links: Sequence[RouterLink]) -> None:
        self._links = tuple(links)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """The sockets of all routers, to wait on."""
        return [link.socket for link in self._links]

    @property
    def is_registered(self) -> bool:
        """Whether any router knows this node."""
        return any(link.is_registered for link in self._links)

    @property
    def num_rejected_messages(self) -> int:
        """Messages of routers that were not acted on."""
        return sum(link.num_rejected_messages for link in self._links)

    def receive(self, now_s: float) -> list[Heard]:
        """The messages that have come, router by router. Raises `Refused` when a router does not take this node and
        none has had it, or when two of the addresses are those of one router."""
        return [heard for link in self._links if (heard := self._receive(link, now_s)) is not None]

    def send_tokens(self, events: Sequence[TokenEvent]) -> None:
        """The tokens of a step: one message for each router that has requests in it."""
        if len(self._links) == 1:
            self._links[0].send_tokens(events)
            return
        by_owner: dict[bytes, list[TokenEvent]] = {}
        for event in events:
            by_owner.setdefault(event.handoff_id[:OWNER_BYTES], []).append(event)
        for link in self._links:
            link.send_tokens(by_owner.get(link.owner, ()))

    def send_read(self, key: RequestKey, read: RowsRead) -> None:
        """Send what was read of a prompt to the router that owns the request."""
        for link in self._owners(key.handoff_id):
            link.send_read(key, read)

    def send_failed(self, handoff_id: bytes, attempt: int, error: BatonError) -> None:
        """Tell the router that owns the attempt why it ended."""
        for link in self._owners(handoff_id):
            link.send_failed(handoff_id, attempt, error)

    def send_handed_over(self, order: HandOver, num_tokens: int) -> None:
        """Answer the `HandOver` of the router that owns the request."""
        for link in self._owners(order.handoff_id):
            link.send_handed_over(order, num_tokens)

    def send_lent(self, order: Lend, num_tokens: int) -> None:
        """Answer the `Lend` of the router that owns the request."""
        for link in self._owners(order.handoff_id):
            link.send_lent(order, num_tokens)

    def send_pulled(self, arrived: Arrived) -> None:
        """Tell the router that owns the request that its prefix has come."""
        for link in self._owners(arrived.key.handoff_id):
            link.send_pulled(arrived)

    def send_cache_changes(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell all routers which blocks the prefix cache gained and lost."""
        for link in self._links:
            link.send_cache_events(stored, removed, is_snapshot=False)

    @property
    def owe_pong(self) -> bool:
        """Whether a router waits for the answer to its Ping."""
        return any(link.owes_pong for link in self._links)

    def answer_pings(self, live: Iterable[RequestKey], uncomputed: Iterable[tuple[RequestKey, int]]) -> None:
        """Answer all routers that wait for a Pong. `live` are all attempts that this node knows. `uncomputed` are those
        whose prompts are not computed, with the number of tokens that are missing."""
        keys, prompts = list(live), list(uncomputed)
        for link in self._links:
            if link.owes_pong:
                own = [key for key in keys if _is_of(link, key.handoff_id)]
                num_tokens = sum(num for key, num in prompts if not _is_of(link, key.handoff_id))
                link.answer_ping(own, len(keys) - len(own), num_tokens)

    def leave(self, now_s: float) -> None:
        """Ask all routers to route nothing more here."""
        for link in self._links:
            link.leave(now_s)

    def has_left(self, now_s: float) -> bool:
        """Whether nothing can be on its way from any router."""
        return all(link.has_left(now_s) for link in self._links)

    def close(self) -> None:
        """Close the connections to all routers."""
        for link in self._links:
            link.close()

    def _owners(self, handoff_id: bytes) -> Iterable[RouterLink]:
        """The router of that request; none when it is gone."""
        return (link for link in self._links if _is_of(link, handoff_id))

    def _receive(self, link: RouterLink, now_s: float) -> Heard | None:
        owner_before = link.owner
        try:
            requests, is_void = link.receive(now_s)
            if is_void and link.is_registered:
                self._require_own_epoch(link, now_s)
        except Refused as error:
            if not any(each.was_registered for each in self._links):
                raise
            _log.error("%s", error)
            return None
        wanted = [request for request in requests if link.is_registered and self._may_ask(link, request)]
        is_void = is_void and bool(owner_before or link.is_registered)
        return Heard(link, wanted, owner_before if is_void else None) if wanted or is_void else None

    def _require_own_epoch(self, link: RouterLink, now_s: float) -> None:
        """The router of this link has just told its epoch, which no other may have."""
        for other in self._links:
            if other is link or other.owner != link.owner or not other.is_registered:
                continue
            if other.session_number == link.session_number:
                raise InvalidSetting(f"--router: {other.address} and {link.address} are one router")
            link.owner = b""
            link.refused("it has the epoch of another router", now_s)
            return

    def _may_ask(self, link: RouterLink, request: Any) -> bool:
        if isinstance(request, Drain):
            return True
        is_leg = isinstance(request, Prefill | Decode)
        ids = (request.handoff_id, *request.forks) if is_leg else (request.handoff_id,)
        if all(_is_of(link, each) for each in ids):
            return True
        error = InvalidMessage("a router asks for requests of another one")
        link.reject(str(error))
        for each in ids if is_leg else ():
            link.send_failed(each, request.attempt, error)
        return False


def _is_of(link: RouterLink, handoff_id: bytes) -> bool:
    return handoff_id[:OWNER_BYTES] == link.owner
