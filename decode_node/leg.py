"""The decode leg of requests: reserve blocks, receive the KV, generate tokens.

Owns the set of the router's requests that are alive at this node, and what each of them waits for. The engine holds the
blocks, and the receiving side (on the transfer thread) owns the handoffs. This module connects the two: it posts
commands to the receiving side and takes its notices in `poll`. A request without a prefill peer is computed here from
its prompt.

Choices of one prompt share its blocks, its handoff and its place here until the KV has come; from then on each is a
request of its own. Each of them can be cancelled at any time.

A request is waiting for room (it has no blocks yet), awaited (its blocks are granted and its KV is to arrive), running
(in the engine), or handed over to another node (`source`). A granted request stays awaited, wanted or not, until the
receiving side has sent `Delivered` or `Released`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from baton.decode_node.source import Source
from baton.engine.attention.base import LayerStored
from baton.engine.cache.hashing import prompt_digest
from baton.engine.core import EngineCore
from baton.engine.handoffs import FirstToken
from baton.engine.held_blocks import Reservation
from baton.engine.scheduler.request import choices_of
from baton.engine.scheduler.step import RequestOutput, Step
from baton.kvtransfer.commands import (
    CancelReceiving,
    Delivered,
    Failed,
    GrantBlocks,
    Released,
    ReservedBlocks,
    Verified,
    WaitForRoom,
)
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.node.choices import choice_keys
from baton.node.events import token_event
from baton.node.first_steps import FirstSteps
from baton.node.metrics import HandoffTimes, StepCounters, counters_as_metrics
from baton.wire.errors import BatonError, InvalidMessage, Overloaded, RequestFailed, TransferFailed
from baton.wire.messages.legs import Decode, HandOver, PrefillPeer
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey

MAX_AWAITED = 4096
"""Requests of all routers that wait for KV; more are refused."""


@dataclass(slots=True)
class _Awaited:
    """A request whose KV is being computed by `peer`. `choices`: the first of them names the handoff; `wanted` are
    those that nobody has cancelled and that have not failed. `reservation` is None while there is no room.
    """

    request: Decode
    peer: PrefillPeer
    choices: tuple[RequestKey, ...]
    wanted: set[RequestKey]
    reservation: Reservation | None = None

    @property
    def handoff(self) -> RequestKey:
        """What the request is called in the reservation and between the nodes."""
        return self.choices[0]


class DecodeLeg:
    """The decode leg of a node's requests. `end` is its receiving side, whose counters are read here. `first_steps`
    holds the requests in the engine whose first tokens are still to come. `source` hands running requests over.

    `others` are the keys of requests in the same engine that another leg has, which may count into the same `counters`.
    """

    def __init__(
        self,
        core: EngineCore,
        end: ReceivingEnd,
        first_steps: FirstSteps,
        source: Source,
        others: Collection[RequestKey] = (),
        counters: StepCounters | None = None,
    ) -> None:
        self._core = core
        self._receiving = end.side
        self._thread = end.thread
        self._notices = end.notices
        self._awaited: dict[RequestKey, _Awaited] = {}
        self._awaited_of: dict[RequestKey, _Awaited] = {}
        self._first_events: list[TokenEvent] = []
        self._failures: list[tuple[RequestKey, BatonError]] = []
        self._counters = StepCounters() if counters is None else counters
        self._exposed = HandoffTimes()
        self._first_steps = first_steps
        self._source = source
        self._others = others

    @property
    def num_live(self) -> int:
        """Number of requests in the engine, and of awaited and handed over ones, even if cancelled, until their blocks
        are released."""
        return len(self._in_engine()) + len(self._awaited) + len(self._source.handoffs)

    @property
    def _num_waiting(self) -> int:
        return sum(1 for awaited in self._awaited.values() if awaited.reservation is None)

    def live_keys(self) -> Iterable[RequestKey]:
        """Requests that wait for KV, requests in the engine, and those that are handed over."""
        return (*self._awaited_of, *self._in_engine(), *self._source.handoffs)

    def _in_engine(self) -> list[RequestKey]:
        keys = self._core.request_keys()
        return [key for key in keys if key not in self._others] if self._others else keys

    def wait_on(self) -> Sequence[Any]:
        """The sockets that wake for notices of both sides."""
        return [self._notices.wakeup, *self._source.wait_on()]

    def begin(self, request: Any, now_s: float) -> None:
        """Take a decode leg. Raises `BatonError`."""
        if not isinstance(request, Decode):
            raise InvalidMessage(f"a decode node cannot serve {type(request).__name__}")
        key, *forks = choices = choice_keys(request)
        if any(choice in self._awaited_of or self._core.is_live(choice) for choice in choices):
            raise InvalidMessage("this attempt of the request exists already")
        if request.prefill_peer is None:
            self._core.add(key, request.prompt, request.params, output_ids=request.output_ids, forks=forks)
            self._first_steps.watch(key, num_tokens=2)
            return
        if len(self._awaited) >= MAX_AWAITED:
            raise Overloaded(f"{len(self._awaited)} requests wait for their KV already")
        self._core.limits.check_size(request.num_tokens)
        self._core.prepare(request.params)
        awaited = self._awaited[key] = _Awaited(request, request.prefill_peer, choices, set(choices))
        self._awaited_of |= dict.fromkeys(choices, awaited)
        # requests that wait for room already come first
        if self._num_waiting > 1 or not self._reserve(key, awaited):
            self._thread.post(WaitForRoom(key, request.prefill_peer))

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """End a running request here, and begin its handoff. Returns for how many of its tokens KV goes with it; 0: it
        goes on."""
        num_tokens = self._source.hand_over(order, now_s)
        if num_tokens and not order.goes_on:
            self._first_steps.forget(RequestKey(order.handoff_id, order.attempt))
        return num_tokens

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Stop a request in the engine, in a handoff to another node, or while it waits for KV."""
        self._source.cancel(key)
        self._core.abort(key)
        self._first_steps.forget(key)
        awaited = self._awaited_of.get(key)
        if awaited is not None and key in awaited.wanted:
            awaited.wanted.remove(key)
            if not awaited.wanted:
                self._thread.post(CancelReceiving(awaited.handoff))
                if awaited.reservation is None:
                    self._forget(awaited.handoff)

    def cancel_all(self, now_s: float, owner: bytes = b"") -> None:
        """Cancel the requests whose id begins with `owner`, and report them as failed."""
        wanted = [key for key, awaited in self._awaited_of.items() if key in awaited.wanted]
        live = [*self._in_engine(), *wanted, *self._source.handoffs]
        for key in [key for key in live if key.handoff_id.startswith(owner)]:
            self.cancel(key, now_s)
            self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self, now_s: float) -> None:
        """Take the notices of both transfer threads, and grant blocks to requests that wait. Raises `BatonError` when
        one has ended."""
        self._thread.require_alive()
        for notice in self._notices.take():
            match notice:
                case Delivered():
                    self._deliver(notice)
                case Failed():
                    self._fail_handoff(notice)
                case Verified():
                    pass  # of prefixes alone, which no leg has
                case Released():
                    self._forget(notice.key)
                    self._core.handoffs.release(notice.key)
        self._source.poll()
        self._grant_waiting()

    def watch(self, step: Step) -> LayerStored | None:
        """Note that a step begins. None: a decode node does not use single layers."""
        self._first_steps.step_begins()
        return None

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """An event for every token of the step. Token 1 of a handoff was sent by its prefill node and is repeated here.
        So the stream has no gap if that message was lost."""
        self._first_steps.step_ends()
        self._source.step_over()
        self._counters.count(outputs)
        times_of = self._first_steps.times_of
        events, self._first_events = self._first_events, []
        events += [event for output in outputs if (event := token_event(output, times_of(output))) is not None]
        return events

    def sent(self, now_s: float) -> None:
        """Do nothing: there is no slow work after the tokens were sent."""

    def lost(self, error: BatonError, now_s: float) -> None:
        """Take the steps in flight as over: they write nothing any more, and none of their KV has left this node."""
        self._first_steps.steps_lost()
        self._source.steps_lost()

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """The requests that failed since the last call, with their errors."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """Abort the request in the engine, and report it as failed."""
        self._core.abort(key)
        self._first_steps.forget(key)
        self._failures.append((key, error))

    def _deliver(self, notice: Delivered) -> None:
        """Let the choices join the batch at the next step, unless they were cancelled or ended by their first token."""
        awaited = self._forget(notice.key)
        if awaited is None or awaited.reservation is None or not awaited.wanted:
            self._core.handoffs.release(notice.key)
            return
        request, reservation = awaited.request, awaited.reservation
        choices = zip(choices_of(awaited.choices, request.params), notice.firsts, strict=True)
        wanted = [(choice, first) for choice, first in choices if choice.key in awaited.wanted]
        going_on = [FirstToken(*choice, first.token_ids[0]) for choice, first in wanted if not first.finish_reason]
        leader = going_on[0].key if going_on else None
        events = [replace(first, handoff=notice.figures) if key == leader else first for (key, _), first in wanted]
        if leader is None:
            self._core.handoffs.release(notice.key)
            self._first_events += events
            return
        self._counters.count_delivered(request.num_tokens, reservation.num_cached_tokens)
        self._exposed.count(notice.figures)
        try:
            self._core.handoffs.add_reserved(
                reservation, request.prompt, going_on, request.output_ids, notice.num_drafted
            )
        except BatonError as error:
            self._failures += [(first.key, error) for first in going_on]
        else:
            self._first_steps.watch(leader, num_tokens=1, ready_us=notice.ready_us)
            self._first_events += events

    def _fail_handoff(self, notice: Failed) -> None:
        """Report that the KV will not come; the router decides whether to try again."""
        awaited = self._awaited.get(notice.key)
        if awaited is None or not awaited.wanted:
            return
        if notice.reason:
            error = TransferFailed(notice.reason)
            self._failures += [(choice, error) for choice in awaited.choices if choice in awaited.wanted]
        awaited.wanted.clear()
        if awaited.reservation is None:
            self._forget(notice.key)
        else:
            # it may have been granted before this notice was taken
            self._thread.post(CancelReceiving(notice.key))

    def _forget(self, key: RequestKey) -> _Awaited | None:
        """The handoff of that name, which is not awaited any more."""
        awaited = self._awaited.pop(key, None)
        for choice in awaited.choices if awaited is not None else ():
            del self._awaited_of[choice]
        return awaited

    def metrics(self) -> Iterable[Metric]:
        """The counts of this leg and of both its sides, and the number of quarantined blocks."""
        yield from self._counters.metrics()
        yield from self._exposed.metrics()
        help_text = "Handoffs received by this node, since its start"
        yield from counters_as_metrics("baton:kv_receive_", help_text, asdict(self._receiving.counters))
        yield from self._source.metrics()
        quarantined = self._receiving.num_quarantined_blocks
        yield GaugeMetricFamily("baton:kv_quarantined_blocks", "Blocks a dead or silent peer may write", quarantined)

    def _grant_waiting(self) -> None:
        """Reserve blocks for requests that wait for room, in order of arrival, up to the first that does not fit."""
        for key, awaited in list(self._awaited.items()):
            if awaited.reservation is None and awaited.wanted and not self._reserve(key, awaited):
                return

    def _reserve(self, key: RequestKey, awaited: _Awaited) -> bool:
        """Reserve blocks for a request and grant them. Returns False when there is no room now."""
        request = awaited.request
        reservation = self._core.handoffs.reserve(key, request.prompt, request.output_ids)
        if reservation is None:
            return False
        blocks = ReservedBlocks(
            key=key,
            num_tokens=request.num_tokens,
            num_cached_tokens=reservation.num_cached_tokens,
            prompt_digest=prompt_digest(request.prompt, request.output_ids),
            block_ids=reservation.missing_block_ids,
            generations=reservation.missing_generations,
            forks=awaited.choices[1:],
        )
        awaited.reservation = reservation
        self._thread.post(GrantBlocks(blocks, awaited.peer))
        return True
