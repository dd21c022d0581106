"""What a decode node does with the router's requests: reserve blocks, take the KV, generate.

Owns which of the router's requests are alive here and what each waits for. The engine holds the blocks, the receiving
side the handoffs; this module connects their verbs. A request without a prefill peer is computed here from its prompt.

A request is waiting for room (no blocks yet), awaited (blocks granted, KV on its way), or running (in the engine).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.api.errors import BatonError, InvalidMessage, RequestFailed, TransferFailed
from engine.api.messages import Decode, PrefillPeer, TokenEvent
from engine.cache.hashing import prompt_digest
from engine.core import EngineCore, Reservation
from engine.scheduler.request import RequestKey, RequestOutput
from engine.service.events import StepCounters, counters_as_metrics, token_event
from engine.service.loop import AttemptKey
from kvtransfer.messages import HandoffKey
from kvtransfer.receiving import Incoming, ReceivingSide


@dataclass(slots=True)
class _Awaited:
    """A request whose KV is being computed by `peer`. `reservation` is None while there is no room."""

    request: Decode
    peer: PrefillPeer
    reservation: Reservation | None = None


class DecodeLeg:
    """See `engine.service.loop.Leg`. Also the `BlockOwner` of its receiving side, which `attach` gives it."""

    def __init__(self, core: EngineCore, lease_s: float) -> None:
        self._core = core
        self._lease_s = lease_s
        self._receiving: ReceivingSide | None = None
        self._awaited: dict[AttemptKey, _Awaited] = {}
        self._first_events: list[TokenEvent] = []
        self._failures: list[tuple[AttemptKey, BatonError]] = []
        self._counters = StepCounters()

    def attach(self, receiving: ReceivingSide) -> None:
        """Complete the construction: the receiving side and its owner need each other."""
        self._receiving = receiving

    @property
    def _handoffs(self) -> ReceivingSide:
        if self._receiving is None:
            raise RuntimeError("a decode leg needs its receiving side")
        return self._receiving

    @property
    def num_live(self) -> int:
        """Requests in the engine, awaited ones, and handoffs whose blocks are not back yet."""
        return len(self._core.request_keys()) + self._handoffs.num_live + self._num_waiting

    @property
    def _num_waiting(self) -> int:
        return sum(1 for awaited in self._awaited.values() if awaited.reservation is None)

    def wait_on(self) -> Sequence[Any]:
        """Links to prefill nodes and data sockets."""
        return self._handoffs.sockets()

    def begin(self, request: Any, now_s: float) -> None:
        """Take a last leg. Raises `BatonError`."""
        if not isinstance(request, Decode):
            raise InvalidMessage(f"a decode node cannot serve {type(request).__name__}")
        key = (request.handoff_id, request.attempt)
        if key in self._awaited or key in self._core.request_keys():
            raise InvalidMessage("this attempt of the request exists already")
        if request.prefill_peer is None:
            self._core.add(
                key,
                request.token_ids,
                request.params,
                num_prompt_tokens=request.num_prompt_tokens,
                cache_salt=request.cache_salt,
            )
            return
        self._core.check_size(len(request.token_ids))
        awaited = _Awaited(request, request.prefill_peer)
        # whoever waits for room already comes first
        if self._num_waiting or not self._reserve(key, awaited, now_s):
            self._handoffs.wait_for_room(key, request.prefill_peer, now_s)
        self._awaited[key] = awaited

    def cancel(self, key: AttemptKey, now_s: float) -> None:
        """See `Leg`."""
        self._core.abort(key)
        self._handoffs.cancel(key, now_s)
        awaited = self._awaited.get(key)
        if awaited is not None and awaited.reservation is None:
            del self._awaited[key]

    def cancel_all(self, now_s: float) -> None:
        """See `Leg`."""
        for key in [*self._core.request_keys(), *self._awaited]:
            if isinstance(key, tuple):
                self.cancel(key, now_s)
                self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self, now_s: float) -> None:
        """See `Leg`."""
        self._handoffs.handle(now_s)
        for lease in self._core.leases.overdue(now_s):
            if isinstance(lease.owner, tuple):
                self._handoffs.expire(lease.owner, now_s)
        self._handoffs.tick(now_s)
        self._grant_waiting(now_s)

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """Every token of the step. Token 1 of a handoff was sent by its prefill node; it is repeated here, so that
        the stream has no gap whatever happened to that message."""
        self._counters.count(outputs)
        events = [event for output in outputs if (event := token_event(output)) is not None]
        events, self._first_events = self._first_events + events, []
        return events

    def sent(self, now_s: float) -> None:
        """Nothing waits for the tokens to be sent."""

    def take_failures(self) -> list[tuple[AttemptKey, BatonError]]:
        """See `Leg`."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """See `Leg`."""
        self._core.abort(key)
        if isinstance(key, tuple):
            self._failures.append((key, error))

    def renew(self, key: HandoffKey, deadline_s: float) -> None:
        """See `BlockOwner`."""
        self._core.leases.renew(key, deadline_s)

    def delivered(self, key: HandoffKey, first: TokenEvent) -> None:
        """See `BlockOwner`: the request joins the batch at the next step."""
        awaited = self._awaited.pop(key)
        request, reservation = awaited.request, awaited.reservation
        if reservation is None:
            raise RuntimeError("KV was delivered for a request without blocks")
        num_transferred = len(request.token_ids) - reservation.num_cached_tokens
        self._counters.num_transferred_tokens += num_transferred
        self._counters.num_cached_tokens += reservation.num_cached_tokens
        try:
            self._core.add_reserved(
                reservation,
                [*request.token_ids, *first.token_ids],
                request.params,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=len(request.token_ids),
                cache_salt=request.cache_salt,
            )
        except BatonError as error:
            self._failures.append((key, error))
        else:
            self._first_events.append(first)

    def spoiled(self, key: HandoffKey, reason: str) -> None:
        """See `BlockOwner`: the router decides whether to try again."""
        self._failures.append((key, TransferFailed(reason)))

    def returned(self, key: HandoffKey) -> None:
        """See `BlockOwner`."""
        self._awaited.pop(key, None)
        self._core.release(key)

    def metrics(self) -> Iterable[Metric]:
        """See `Leg`."""
        yield from self._counters.metrics()
        help_text = "Handoffs received by this node, since its start"
        yield from counters_as_metrics("baton:kv_receive_", help_text, asdict(self._handoffs.counters))
        yield CounterMetricFamily("baton:num_preemptions", "Requests computed again", self._core.num_preemptions)
        quarantined = self._handoffs.num_quarantined_blocks
        yield GaugeMetricFamily("baton:kv_quarantined_blocks", "Blocks a dead or silent peer may write", quarantined)

    def close(self) -> None:
        """See `Leg`."""
        self._handoffs.close()

    def _grant_waiting(self, now_s: float) -> None:
        """Give room to those that wait for it, in order of arrival; the first that does not fit keeps its place."""
        for key, awaited in list(self._awaited.items()):
            if awaited.reservation is not None:
                continue
            try:
                if not self._reserve(key, awaited, now_s):
                    return
            except BatonError as error:
                self.cancel(key, now_s)
                self._failures.append((key, error))

    def _reserve(self, key: AttemptKey, awaited: _Awaited, now_s: float) -> bool:
        """Set blocks aside and grant them. False when there is no room now; raises `BatonError`, holding nothing, when
        the peer cannot be dialled.
        """
        request = awaited.request
        deadline_s = now_s + self._lease_s
        reservation = self._core.reserve(key, request.token_ids, deadline_s, cache_salt=request.cache_salt)
        if reservation is None:
            return False
        incoming = Incoming(
            key=key,
            num_tokens=len(request.token_ids),
            num_cached_tokens=reservation.num_cached_tokens,
            prompt_digest=prompt_digest(request.token_ids),
            block_ids=reservation.missing_block_ids,
            generations=reservation.missing_generations,
        )
        try:
            self._handoffs.grant(incoming, awaited.peer, now_s)
        except BatonError:
            self._core.release(key)
            raise
        awaited.reservation = reservation
        return True
