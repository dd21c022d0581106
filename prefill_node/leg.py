"""What a prefill node does with the router's requests: compute the prompt, draw one token, hand the KV over.

Owns which of the router's requests are alive here. The engine holds the blocks, the sending side the handoffs; this
module only connects their verbs. A request ends here when the decode node has released its KV, or at once when its
first token already ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client.core import Metric

from engine.api.errors import BatonError, InvalidMessage, RequestFailed
from engine.api.messages import Prefill, TokenEvent
from engine.cache.hashing import prompt_digest
from engine.core import EngineCore
from engine.scheduler.request import RequestKey, RequestOutput
from engine.service.events import StepCounters, counters_as_metrics, token_event
from engine.service.loop import AttemptKey
from kvtransfer.messages import HandoffKey
from kvtransfer.sending import SendingSide


class EngineBlocks:
    """The engine as `kvtransfer.sending` sees it."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def block_table(self, key: HandoffKey) -> Sequence[int]:
        """See `BlockHolder`."""
        return self._core.block_table(key)

    def renew(self, key: HandoffKey, deadline_s: float) -> None:
        """See `BlockHolder`."""
        self._core.leases.renew(key, deadline_s)

    def let_go(self, key: HandoffKey) -> None:
        """See `BlockHolder`."""
        self._core.abort(key)
        self._core.release(key)


class PrefillLeg:
    """See `engine.service.loop.Leg`."""

    def __init__(self, core: EngineCore, sending: SendingSide, sources: Sequence[Any]) -> None:
        self._core = core
        self._sending = sending
        self._sources = sources
        self._failures: list[tuple[AttemptKey, BatonError]] = []
        self._finished: list[TokenEvent] = []
        self._counters = StepCounters()

    @property
    def num_live(self) -> int:
        """Prompts being computed and handoffs not yet released."""
        return self._sending.num_live

    def wait_on(self) -> Sequence[Any]:
        """The peers' socket and the pushing thread's wake-up."""
        return self._sources

    def begin(self, request: Any, now_s: float) -> None:
        """Compute a prompt for a handoff. Raises `BatonError`."""
        if not isinstance(request, Prefill):
            raise InvalidMessage(f"a prefill node cannot serve {type(request).__name__}")
        key = (request.handoff_id, request.attempt)
        self._sending.begin(
            key,
            decode_node_id=request.decode_node_id,
            decode_epoch=request.decode_epoch,
            num_tokens=len(request.token_ids),
            prompt_digest=prompt_digest(request.token_ids),
            now_s=now_s,
        )
        try:
            self._core.add(
                key,
                request.token_ids,
                request.params,
                num_prompt_tokens=request.num_prompt_tokens,
                cache_salt=request.cache_salt,
                first_token_only=True,
            )
        except BatonError:
            self._sending.withdraw(key, "refused by the engine", now_s)
            raise

    def cancel(self, key: AttemptKey, now_s: float) -> None:
        """See `Leg`."""
        self._sending.withdraw(key, "cancelled", now_s)

    def cancel_all(self, now_s: float) -> None:
        """See `Leg`."""
        for key in self._sending.live_keys():
            self.cancel(key, now_s)
            self._failures.append((key, RequestFailed("the router was silent for too long")))

    def poll(self, now_s: float) -> None:
        """See `Leg`."""
        self._sending.handle(now_s)
        self._sending.collect(now_s)
        for lease in self._core.leases.overdue(now_s):
            if isinstance(lease.owner, tuple):
                self._sending.expire(lease.owner, now_s)
        self._sending.tick(now_s)

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """Token 1 of the prompts that this step finished; it goes to the client before its KV is complete at D."""
        self._counters.count(outputs)
        events = []
        for output in outputs:
            event = token_event(output)
            if event is not None:
                events.append(event)
            elif isinstance(output.key, tuple):
                self._sending.advance(output.key, output.num_computed_tokens)
        self._finished = events
        return events

    def sent(self, now_s: float) -> None:
        """Push the rest of the finished prompts; a request that token 1 ends has nothing to hand over."""
        for event in self._finished:
            key = (event.handoff_id, event.attempt)
            if event.finish_reason:
                self._sending.withdraw(key, "the first token ended the request", now_s, request_ended=True)
            else:
                self._sending.finish(key, event, now_s)
        self._finished = []

    def take_failures(self) -> list[tuple[AttemptKey, BatonError]]:
        """See `Leg`."""
        failures, self._failures = self._failures, []
        return failures

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """See `Leg`."""
        # a request that is waiting for its last reads may be in more steps, and fail again
        if isinstance(key, tuple) and self._sending.withdraw(key, str(error), now_s):
            self._failures.append((key, error))

    def metrics(self) -> Iterable[Metric]:
        """See `Leg`."""
        yield from self._counters.metrics()
        help_text = "Handoffs sent by this node, since its start"
        yield from counters_as_metrics("baton:kv_send_", help_text, asdict(self._sending.counters))

    def close(self) -> None:
        """See `Leg`."""
        self._sending.close()
