"""How often and when one request is tried again: by the reasons its attempts failed for, not by their number.

A node that was lost is one reason, however many attempts it cost, and none any more when the same life of it comes
back: then only its connection was lost. Every failure that a node reports is a reason of its own, but two handoffs that
fail are one: what is wrong between two nodes, such as a transport that is away for longer than a lease, fails the next
handoff too, and behind the second the decode node computes the prompt itself. The first attempt after a quiet time
begins at once; failures that follow each other closely wait longer each time, because what broke one node's connection
may break those of the others in the same second. A node that has no room, because other routers use it too, has refused
and not failed: the request goes elsewhere, or asks again until its deadline.

The next attempt begins at once, after such a delay, when a node has joined, or when it is its turn among confined
requests (`baton.router.routing.suspicion`). Owns the timers of these waits. Does not know what an attempt is: it calls
the flight when one is to begin, and when there is none to be. At most one wait is under way, and none after `stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from baton.router.nodes.registry import Node
from baton.router.requests.node_wait import NodeWait
from baton.router.routing.placement import Route
from baton.router.routing.selection import Routing
from baton.router.routing.suspicion import Confinement, Suspicion
from baton.wire.errors import BatonError, NoNode, Overloaded, RequestFailed, TransferFailed

QUIET_S = 2.0
DOUBT_S = 2.0
"""A request of which nodes seem to have died ends so much later. One that comes back meanwhile in the same life had
lost its connection only."""
FIRST_DELAY_S, LAST_DELAY_S = 0.25, 2.0
_RETRYABLE = (RequestFailed, Overloaded)


class FailureReasons:
    """For how many reasons a request has failed, which has to be fewer than `max_reasons`. Times are of one clock."""

    def __init__(self, max_reasons: int) -> None:
        self._max_reasons = max_reasons
        self._lost: set[int] = set()
        self._num_failures = 0
        self._has_failed_handoff = False
        self._num_in_a_row = 0
        self._failed_s: float | None = None

    @property
    def allow_another(self) -> bool:
        """Whether another attempt may begin."""
        return len(self._lost) + self._num_failures < self._max_reasons

    def failed(self, now_s: float, error: BatonError, lost_epoch: int | None = None) -> float:
        """An attempt failed, because that node was lost, or with what a node has said (None). Returns the seconds that
        another one has to wait."""
        is_handoff = isinstance(error, RequestFailed) and error.cause_code == TransferFailed.code
        if lost_epoch is not None:
            self._lost.add(lost_epoch)
        elif not isinstance(error, Overloaded):
            self._num_failures += not (is_handoff and self._has_failed_handoff)
            self._has_failed_handoff ^= is_handoff
        is_quiet = self._failed_s is None or now_s - self._failed_s > QUIET_S
        self._failed_s = now_s
        self._num_in_a_row = 0 if is_quiet else self._num_in_a_row + 1
        return min(FIRST_DELAY_S * 2 ** (self._num_in_a_row - 1), LAST_DELAY_S) if self._num_in_a_row else 0.0

    def is_back(self, epoch: int) -> None:
        """A node has joined: if it was lost, it was not dead."""
        self._lost.discard(epoch)


class Retries:
    """The further attempts of the request with this handoff id. `start` begins an attempt, and raises `NoNode` when no
    node can be given it; `fail` ends the request. Lives on one event loop."""

    def __init__(
        self,
        handoff_id: bytes,
        routing: Routing,
        node_wait: NodeWait,
        max_reasons: int,
        start: Callable[[], None],
        fail: Callable[[BatonError], None],
    ) -> None:
        self._handoff_id = handoff_id
        self._routing, self._node_wait = routing, node_wait
        self._start, self._fail = start, fail
        self._reasons = FailureReasons(max_reasons)
        self._suspicion = Suspicion()
        self._delay_s = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._node_deadline: asyncio.TimerHandle | None = None

    @property
    def confinement(self) -> Confinement | None:
        """Which nodes may still be given the request; None: all."""
        return self._suspicion.confinement

    def begins_at(self, route: Route) -> None:
        """An attempt is sent to these nodes."""
        if self._suspicion.confinement is not None:
            nodes = [node for node in (route.prefill, route.decode) if node is not None]
            self._routing.probation.begin(self._handoff_id, [node.epoch for node in nodes])

    def is_over(self) -> None:
        """The attempt has begun well, or has ended: others may be confined to its nodes."""
        self._routing.probation.end(self._handoff_id)

    def lost(self, node: Node, *, is_suspicious: bool) -> None:
        """A node was lost while it had a leg of the request."""
        self._suspicion.lost(node, is_suspicious=is_suspicious)

    def failed(self, error: BatonError, silent: Iterable[Node], lost_epoch: int | None) -> BatonError | None:
        """An attempt failed, because the node of `lost_epoch` was lost or for another reason; `silent` nodes have said
        nothing of it. Returns the error that the request ends with, None when it is to be tried again."""
        now_s = asyncio.get_running_loop().time()
        self._delay_s = self._reasons.failed(now_s, error, lost_epoch)
        if self._suspicion.is_certain:
            self._delay_s = max(self._delay_s, DOUBT_S)
        if not isinstance(error, _RETRYABLE) or not self._reasons.allow_another:
            return error
        self._suspicion.ended(silent, lost_epoch)
        return None

    def begin_again(self) -> None:
        """Begin the attempt after the one that has failed. Without a delay a confined one comes behind those that wait
        for their turn."""
        if self._delay_s or self._suspicion.confinement is not None:
            self._retry = asyncio.get_running_loop().call_later(self._delay_s, self.begin)
        else:
            self.begin()

    def begin(self) -> None:
        """Begin an attempt now. Without a node it waits for one, as long as a flight may."""
        self._retry = None
        try:
            self._suspicion.begins(self._routing.registry.get)
            self._start()
        except NoNode as error:
            if self._suspicion.confinement is not None:
                self._routing.probation.wait(self._handoff_id, self._begin_confined)
            if self._node_deadline is None:
                wait_s = self._suspicion.wait_s(self._node_wait.timeout_s)
                self._node_deadline = asyncio.get_running_loop().call_later(wait_s, self._waited_in_vain, error)
        except BatonError as error:
            self._fail(error)
        else:
            self._stop_node_deadline()

    def node_joined(self, epoch: int) -> None:
        """Begin the attempt that has waited for a node."""
        self._reasons.is_back(epoch)
        self._suspicion.is_back(epoch)
        if self._node_deadline is not None:
            self._routing.probation.end(self._handoff_id)  # it may be confined no longer
            self.begin()

    def stop_waiting(self) -> None:
        """No node is going to join: fail if this one waits for it."""
        if self._node_deadline is not None:
            self._fail(NoNode("no decode node is available"))

    def stop(self) -> None:
        """The request has ended: no attempt begins any more, and its flight, with its media, is not held here."""
        self._start, self._fail = _nothing, _ignore
        if self._retry is not None:
            self._retry.cancel()
        self._stop_node_deadline()

    def _waited_in_vain(self, error: NoNode) -> None:
        waits_its_turn = self._suspicion.confinement is not None and self._routing.probation.is_taken
        if self._suspicion.lift() or waits_its_turn:
            self._node_deadline = None
            self.begin()
        else:
            self._fail(error)

    def _begin_confined(self) -> None:
        """A confined request has left its node: time begins anew for those that wait for one too."""
        self._stop_node_deadline()
        self.begin()

    def _stop_node_deadline(self) -> None:
        if self._node_deadline is not None:
            self._node_deadline.cancel()
            self._node_deadline = None


def _nothing() -> None:
    """There is nothing to begin."""


def _ignore(error: BatonError) -> None:
    """Nobody is there to be told."""
