"""The relay: it admits requests, and passes each message of a node to the request in flight that it belongs to.

Owns the table of flights and the limits of the router. `router/requests/flight.py` handles a single request,
`router/http/openai` handles text, and `router/nodes/control.py` handles sockets. Lives on one event loop.

A request stays in the table until its reader closes it, so that one whose answer is still being written counts too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from baton.router.nodes.registry import Node, NodeRegistry
from baton.router.requests.attempt import ControlSender, RelayRequest
from baton.router.requests.figures import RelayCounters
from baton.router.requests.flight import Flight, FlightContext
from baton.router.requests.inbox import Inbox
from baton.router.requests.moves import LeavingNodes
from baton.router.requests.node_wait import NodeWait
from baton.router.routing.ejection import Ejections
from baton.router.routing.goals import NO_GOALS, Attainment, Goals
from baton.router.routing.placement import Placement, Route
from baton.router.routing.policies import Policy, Prefix
from baton.router.routing.prefix_ways import PrefixWays
from baton.router.routing.pulls import PullRecords
from baton.router.routing.selection import Routing
from baton.router.routing.suspicion import Probation
from baton.runtime.clock import host_clock
from baton.wire.errors import BatonError, ContextLengthExceeded, NoNode, Overloaded
from baton.wire.messages.legs import Cancel, HandedOver
from baton.wire.messages.membership import Drain
from baton.wire.messages.output import Failed, PromptRead, Tokens
from baton.wire.messages.prefixes import Pulled

_ADMITTED_PER_SEQ = 4
"""Requests in flight for each one that decode nodes can compute together: while some generate, the prompts of others
are computed and moved."""
_PONGS_PER_LOOK = 4
"""Requests that a node knows are looked at with each fourth of its Pongs, whether they go on."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Limits of the relay."""

    local_prefill_tokens: int
    max_concurrent_requests: int
    max_attempts: int
    request_timeout_s: float
    node_wait_s: float | None = 0.0
    goals: Goals | None = None
    refuse_late: bool = False


def _look_at_caches(*policies: Policy) -> bool:
    return all(isinstance(policy, Prefix) for policy in policies)


class Relay:
    """Starts flights and hands them what nodes say; the `ControlHandler` of the control link."""

    def __init__(
        self,
        registry: NodeRegistry,
        sender: ControlSender,
        prefill_policy: Policy,
        decode_policy: Policy,
        settings: RelaySettings,
        ways: PrefixWays | None = None,
    ) -> None:
        self.counters = RelayCounters()
        self.pulls = PullRecords() if ways is None else ways.records
        self.ejections = Ejections(registry)
        self.attainments = {model: Attainment(settings.goals or NO_GOALS) for model in registry.models}
        self.node_wait = NodeWait(
            lambda model: bool(registry.of_model(model)), settings.node_wait_s, settings.max_concurrent_requests
        )
        self._registry = registry
        self._sender = sender
        self._max_concurrent_requests = settings.max_concurrent_requests
        self._context = FlightContext(
            routing=Routing(
                registry,
                prefill_policy,
                decode_policy,
                settings.local_prefill_tokens,
                Probation(),
                self.ejections,
                ways or (PrefixWays(self.pulls) if _look_at_caches(prefill_policy, decode_policy) else None),
                None if settings.goals is None else Placement(settings.goals),
                self._refuse_late if settings.refuse_late else None,
            ),
            sender=sender,
            counters=self.counters,
            pulls=self.pulls,
            max_attempts=settings.max_attempts,
            timeout_s=settings.request_timeout_s,
            node_wait=self.node_wait,
            clock=host_clock(),
        )
        self._flights: dict[bytes, Flight] = {}
        self._leaving = LeavingNodes(registry, self._flights)

    @property
    def num_in_flight(self) -> int:
        """Requests that have not been closed."""
        return len(self._flights)

    def count_by_model(self) -> Counter[str]:
        """The same by the name of the model."""
        return Counter(flight.model for flight in self._flights.values())

    @property
    def capacity(self) -> int:
        """For how many requests the nodes have use: more would only wait there, in no fair order. What other routers
        have there leaves less, but no less than half: they hold back too. Those that wait for their readers are not at
        any node."""
        num_served = _ADMITTED_PER_SEQ * self._registry.num_decoded_together
        if not num_served:
            return self._max_concurrent_requests
        num_of_others = sum(node.num_other_legs for node in self._registry.staying_decodes)
        return max(num_served - num_of_others, num_served // 2) + self.node_wait.num_paused

    def check_size(
        self,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int | None,
        param: str,
        media: AbstractSet[str] = frozenset(),
    ) -> int | None:
        """How many of `max_tokens` (None: as many as there is room for) fit behind a prompt on the largest node of
        `model` that computes these kinds of media.

        Raises `ContextLengthExceeded` when not a single one does, `NoNode` without nodes.
        """
        limit = self._registry.max_request_tokens(model, media)
        if limit is None:
            raise NoNode("no node has joined yet", retry_after_s=1)
        if num_prompt_tokens >= limit:
            raise ContextLengthExceeded(
                f"this model's context is {limit} tokens, and the prompt of {num_prompt_tokens} leaves no room for the "
                "output",
                param,
            )
        return None if max_tokens is None else min(max_tokens, limit - num_prompt_tokens)

    def takes_media(self, model: str, kind: str) -> bool:
        """Whether a decode node of `model` computes that kind of media, or while it has none, any node: prefill nodes
        alone do not serve them, since a decode node has to know where the text behind a medium stands."""
        return self._registry.max_request_tokens(model, {kind}) is not None

    def check_room(self, num_requests: int) -> None:
        """Raise `Overloaded` when `num_requests` more would exceed the limit."""
        if len(self._flights) + num_requests > self._max_concurrent_requests:
            raise Overloaded(f"{len(self._flights)} requests are in flight already")

    def start(self, request: RelayRequest, inbox: Inbox, index: int = 0) -> Flight:
        """Send a request to the nodes. Its tokens come to `inbox` as those of choice `index`, until one delivery has a
        finish reason; or `NoNode`, `ContextLengthExceeded`, `RequestFailed` or `DeadlineExceeded` comes there.

        The caller has to `close` it, whatever comes. Raises `Overloaded`.
        """
        return self.start_choices([request], inbox, index)[0]

    def start_choices(self, requests: Sequence[RelayRequest], inbox: Inbox, first_index: int) -> list[Flight]:
        """As `start` for choices of one prompt, with numbers and indexes that follow each other. The nodes compute and
        move the prompt once, or, if no step of theirs has room for so many choices, once for as many as it has."""
        self.check_room(len(requests))
        flights = [Flight(self._context, each, inbox, first_index + number) for number, each in enumerate(requests)]
        self._flights |= {flight.handoff_id: flight for flight in flights}
        size = self._registry.max_num_seqs(requests[0].model) or 1
        for first in range(0, len(flights), size):
            flights[first].start(flights[first + 1 : first + size])
        return flights

    def _refuse_late(self, model: str, route: Route) -> None:
        self.attainments[model].refused(is_slow=route.is_slow)
        what = "the time between its tokens" if route.is_slow else "its first token"
        raise Overloaded(f"{what} would miss the goal: the nodes have too much to do", max(1, math.ceil(route.late_s)))

    def close(self, flight: Flight) -> None:
        """The reader wants no more of this request: cancel what nodes still do for it. Harmless when repeated."""
        if self._flights.pop(flight.handoff_id, None) is not None:
            flight.close()

    def fail_all(self, error: BatonError) -> None:
        """End every request with `error`, which its reader gets after all earlier deliveries."""
        for flight in self._flights.values():
            flight.fail(error)

    def on_tokens(self, tokens: Tokens) -> None:
        """A node has sampled tokens for these flights. It is to stop what belongs to none."""
        for event in tokens.events:
            flight = self._flights.get(event.handoff_id)
            if flight is None:
                # the node has not heard that the request ended, or was declared lost: it must stop
                self._sender.send(tokens.epoch, Cancel(event.handoff_id, event.attempt))
            else:
                flight.on_event(event, tokens.epoch)

    def on_prompt_read(self, read: PromptRead) -> None:
        """A node tells what it has read of a prompt, for the flight that asked for it."""
        flight = self._flights.get(read.handoff_id)
        if flight is None:
            self._sender.send(read.epoch, Cancel(read.handoff_id, read.attempt))
        else:
            flight.on_prompt_read(read)

    def on_failed(self, failed: Failed, epoch: int) -> None:
        """A node reports that an attempt has failed."""
        flight = self._flights.get(failed.handoff_id)
        if flight is not None:
            flight.on_failed(failed, epoch)

    def on_handed_over(self, handed: HandedOver, node: Node) -> None:
        """A node answers whether it hands a request over. Nobody takes it when the request has ended."""
        flight = self._flights.get(handed.handoff_id)
        if flight is not None:
            flight.on_handed_over(handed, node)
        elif handed.num_tokens:
            self._sender.send(node.epoch, Cancel(handed.handoff_id, handed.attempt))

    def on_pulled(self, pulled: Pulled, node: Node) -> None:
        """A node has a prefix that was to be copied there."""
        flight = self._flights.get(pulled.handoff_id)
        if flight is not None:
            flight.on_pulled(pulled, node)

    def on_leaving(self, node: Node) -> None:
        """A node finishes what it has: its requests are moved to others."""
        self._leaving.begin(node)

    def drain(self, node: Node, *, starts_again: bool) -> None:
        """Ask a node to finish its work and to end: it gets no more, and other decode nodes go on with what it
        generates."""
        self._registry.leave(node.epoch)
        self._sender.send(node.epoch, Drain(starts_again))
        self._leaving.begin(node)

    def on_live(self, node: Node, live: AbstractSet[bytes], received: int) -> None:
        """A node says which attempts it knows. Flights that miss theirs look, with each fourth Pong all of them."""
        node.num_pongs += 1
        looks_at_all = node.num_pongs % _PONGS_PER_LOOK == 0
        missed_before = node.missed_ids
        node.missed_ids = {handoff_id for handoff_id, key in node.live_keys.items() if key not in live}
        for handoff_id in list(node.live_keys):
            if looks_at_all or handoff_id in node.missed_ids or handoff_id in missed_before:
                flight = self._flights.get(handoff_id)
                if flight is not None:
                    flight.on_live(node, live, received)

    def stop_waiting(self) -> None:
        """The router shuts down: no request waits for a node any more, and none is moved."""
        self._leaving.close()
        self.node_wait.close()
        for flight in self._flights.values():
            flight.stop_waiting()

    def on_node_joined(self, node: Node) -> None:
        """A node can be given legs: those that wait for one go on."""
        self.node_wait.on_node_joined(node.hello.start_ms / 1000)
        for flight in self._flights.values():
            flight.on_node_joined(node.epoch)

    def on_node_lost(self, node: Node, reason: str) -> None:
        """A node is lost: the flights that have a leg there are told."""
        for flight in self._flights_on(node):
            flight.on_node_lost(node, reason)

    def _flights_on(self, node: Node) -> list[Flight]:
        """The requests that have a leg there. Others do not care what becomes of a node, and there may be many."""
        return [self._flights[handoff_id] for handoff_id in node.live_keys if handoff_id in self._flights]
