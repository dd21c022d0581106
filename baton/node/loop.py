"""The engine loop: it reads messages, runs a step and sends the results, again and again.

Owns the order of these and the waiting between them. A `Leg` says what requests mean for a role; the loop is the same
for both roles. Idle means blocked on sockets: the loop wakes for a message, a finished transfer, a signal or a timer,
nothing else. Transfers have a thread of their own (see `baton.kvtransfer.thread`); the loop only takes its notices.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import zmq
from prometheus_client.core import Metric

from baton.engine.attention.base import LayerStored
from baton.engine.core import EngineCore
from baton.engine.scheduler.step import RequestOutput, Step
from baton.engine.steps_in_flight import StepFailed
from baton.node.borrower import Arrived
from baton.node.events import failure_of, failure_of_read
from baton.node.heartbeat import HeartbeatThread
from baton.node.lent_cores import LentCores
from baton.node.router_links import Heard, RouterLinks
from baton.node.stopper import Stopper
from baton.wire.errors import BatonError
from baton.wire.messages.legs import Cancel, HandOver
from baton.wire.messages.membership import Drain
from baton.wire.messages.output import TokenEvent
from baton.wire.messages.prefixes import Lend, Pull
from baton.wire.request_key import RequestKey

_TICK_S = 0.25
_READINESS_TICK_S = 0.002
"""While a request waits for its grammar or for KV, which threads make: mostly for less than that."""

_log = logging.getLogger(__name__)


class Leg(Protocol):
    """A role's handling of requests: it turns them into calls of the engine, and steps into commands for transfers."""

    @property
    def num_live(self) -> int:
        """Requests and handoffs that have not ended."""
        ...

    def live_keys(self) -> Iterable[RequestKey]:
        """The attempts of the router that this node knows and that have not ended, among them at least all that it
        still works on."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """Sockets (ZMQ or with a file descriptor) that `poll` should be called for. Asked once: they stay the same."""
        ...

    def begin(self, request: Any, now_s: float) -> None:
        """Take a request of the router. Raises `BatonError` to refuse it."""
        ...

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """End a request and begin to hand its KV over to another node. How many of its tokens have their KV in that
        handoff; 0: it cannot be handed over now, and goes on here."""
        ...

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Stop an attempt in any state. Harmless when it is unknown."""
        ...

    def cancel_all(self, now_s: float, owner: bytes = b"") -> None:
        """Stop everything whose id begins with `owner`, because the router that asked for it is gone. All of it is
        reported as failed, should it come back."""
        ...

    def poll(self, now_s: float) -> None:
        """Take the notices of the transfer thread. Raises `BatonError` when transfers cannot go on at all."""
        ...

    def watch(self, step: Step) -> LayerStored | None:
        """A step is about to be launched. Returns what is to be called after each layer, or None.

        The next may be launched before `applied` was called for this one; that comes in the order of launches.
        """
        ...

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """The oldest step in flight was computed (without a step, `outputs` is empty). Returns events for the router;
        anything slow is left to `sent`."""
        ...

    def sent(self, now_s: float) -> None:
        """The events that `applied` returned were sent: do what is slow."""
        ...

    def lost(self, error: BatonError, now_s: float) -> None:
        """The steps in flight have failed and will not be `applied`: fail every handoff that relied on their KV."""
        ...

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """Attempts that ended by themselves without finishing, since the last call."""
        ...

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """The engine could not compute this request: drop it and report it in `take_failures`."""
        ...

    def metrics(self) -> Iterable[Metric]:
        """Figures of this role for /metrics."""
        ...


class LoopLeg(Leg, Protocol):
    """A leg that shares its prefix cache with other nodes: what the loop serves."""

    def lend(self, order: Lend, now_s: float) -> int:
        """Begin to hand over what is cached of a prompt's beginning. How many tokens of it; 0: none."""
        ...

    def take_arrived(self) -> list[Arrived]:
        """The prefixes that have come from other nodes since the last call."""
        ...


class EngineLoop:
    """Runs until told to stop and drained, or refused by its routers."""

    def __init__(
        self,
        core: EngineCore,
        leg: LoopLeg,
        routers: RouterLinks,
        heartbeat: HeartbeatThread,
        stopper: Stopper,
        clock: Callable[[], float] = time.monotonic,
        cores: LentCores | None = None,
    ) -> None:
        self._clock = clock
        self._cores = cores or LentCores(None)
        self._rests_until_s = 0.0
        self._core = core
        self._leg = leg
        self._routers = routers
        self._heartbeat = heartbeat
        self._stopper = stopper
        self._could_step = False
        self._awaits_readiness = False
        self._grows = False
        self._is_leaving = False
        self._poller = zmq.Poller()
        for source in (*routers.sockets, stopper.wakeup, *leg.wait_on()):
            self._poller.register(source, zmq.POLLIN)

    def run(self, each_round: Callable[[], None]) -> None:
        """Serve, calling `each_round` once a round. Raises `Refused` when no router takes this node, and
        `DeviceFailed` when nothing can be computed here any more."""
        is_serving = True
        while is_serving:
            each_round()
            wait_ms = math.ceil(self.wait_s * 1000)
            if wait_ms:
                self._cores.lend(wait_ms / 1000 if self._could_step else -1.0)
            self._poller.poll(wait_ms)
            self._cores.take_back()
            self._stopper.drain()
            is_serving = self.turn()

    @property
    def wait_s(self) -> float:
        """The seconds that the next round may wait if nothing comes."""
        if self._could_step:
            return max(0.0, self._rests_until_s - self._clock())
        if self._grows:
            return 0.0
        return _READINESS_TICK_S if self._awaits_readiness else _TICK_S

    def turn(self) -> bool:
        """One round, without its wait. Returns False when it was the last. Raises as `run`."""
        now_s = self._clock()
        for heard in self._routers.receive(now_s):
            self._serve(heard, now_s)
        self._leg.poll(now_s)
        # before a step, which may be long: the router counts how long a prefix takes, and frees who lends it
        self._report_failures()
        self._report_arrived()
        self._step(now_s)
        self._report_failures()
        self._report_cache()
        if self._routers.owe_pong:
            self._routers.answer_pings(self._leg.live_keys(), self._core.uncomputed_prompts())
        self._grows = not self._core.has_work and self._core.grow()
        self._heartbeat.publish(self._clock(), self._core.status())
        if self._stopper.is_asked and not self._is_leaving:
            self._is_leaving = True
            level = logging.INFO if self._leg.num_live else logging.DEBUG  # nothing to wait for: nothing to say
            _log.log(level, "draining: %d requests to finish", self._leg.num_live)
            self._routers.leave(now_s)
        return not self._is_leaving or not (self._has_finished(now_s) or self._stopper.is_overdue(now_s))

    def _has_finished(self, now_s: float) -> bool:
        """Whether nothing is left to do here, and nothing can be on its way from a router."""
        return not self._leg.num_live and self._routers.has_left(now_s)

    def _serve(self, heard: Heard, now_s: float) -> None:
        if heard.void is not None:
            if heard.void:
                self._leg.cancel_all(now_s, heard.void)
            heard.link.send_cache_events(self._core.cached_hashes(), [], is_snapshot=True)
            if self._is_leaving:
                heard.link.leave(now_s)
        for request in heard.requests:
            match request:
                case Cancel():
                    self._leg.cancel(RequestKey(request.handoff_id, request.attempt), now_s)
                case HandOver():
                    self._routers.send_handed_over(request, self._leg.hand_over(request, now_s))
                case Lend():
                    self._routers.send_lent(request, self._leg.lend(request, now_s))
                case Drain():
                    self._stopper.ask(now_s, starts_again=request.starts_again)
                case _:
                    self._begin(request, now_s)

    def _begin(self, request: Any, now_s: float) -> None:
        # also when this node is leaving: the router sent it before it knew, and will send no more
        try:
            self._leg.begin(request, now_s)
        except BatonError as error:
            forks = () if isinstance(request, Pull) else request.forks
            for handoff_id in (request.handoff_id, *forks):
                self._routers.send_failed(handoff_id, request.attempt, error)

    def _step(self, now_s: float) -> None:
        is_resting, self._could_step, self._awaits_readiness = now_s < self._rests_until_s, False, False
        if not self._core.has_work:
            return
        if is_resting:
            self._could_step = True
            return
        was_in_flight = self._core.num_steps_in_flight > 0
        try:
            outputs = self._core.step(self._leg.watch)
        except StepFailed as error:
            _log.exception("a step failed")
            self._leg.lost(error, now_s)
            for key in error.keys:
                self._leg.fail(key, error, now_s)
            return
        # a step whose requests were all aborted has no outputs, but there may be room now
        self._could_step = was_in_flight or bool(outputs)
        self._awaits_readiness = self._core.awaits_readiness
        done_s = self._clock()
        self._rests_until_s = done_s + self._cores.rest_s(done_s - now_s)
        for output in outputs:
            if output.has_failed:
                self._leg.fail(output.key, failure_of(output), done_s)
        # before token 1, which the router holds back until it has all of these
        reads = [(output.key, output.read) for output in outputs if output.read is not None]
        for key, read in reads:
            if read.is_valid:
                self._routers.send_read(key, read)
        self._routers.send_tokens(self._leg.applied(outputs, done_s))
        self._leg.sent(done_s)
        for key, read in reads:
            if not read.is_valid:
                self._leg.fail(key, failure_of_read(read), done_s)

    def _report_failures(self) -> None:
        for (handoff_id, attempt), error in self._leg.take_failures():
            self._routers.send_failed(handoff_id, attempt, error)

    def _report_cache(self) -> None:
        changes = self._core.take_cache_changes()
        if changes.stored or changes.removed:
            self._routers.send_cache_changes(changes.stored, changes.removed)

    def _report_arrived(self) -> None:
        if arrived := self._leg.take_arrived():
            self._report_cache()
            for each in arrived:
                self._routers.send_pulled(each)
