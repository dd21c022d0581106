"""Both legs beside each other: every request of the router goes to the leg that it is of, whatever the node prefers.

Owns nothing but the two legs, which share an engine, its steps and one sending side. A step may hold requests of both,
so each leg is shown its own; a leg that has nothing in a step is told of it all the same, because both count steps.

Invariant: a key is of one leg at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from prometheus_client.core import Metric

from baton.engine.attention.base import LayerStored
from baton.engine.scheduler.step import RequestOutput, Step
from baton.kvtransfer.commands import SendingNotice
from baton.node.choices import choice_keys
from baton.node.loop import Leg
from baton.wire.errors import BatonError, InvalidMessage
from baton.wire.messages.legs import HandOver, Prefill
from baton.wire.messages.output import TokenEvent
from baton.wire.request_key import RequestKey

_NOTHING = Step(())


class PromptLeg(Leg, Protocol):
    """A leg whose sending side is another's too. `keys` shows the attempts that it has blocks for, at any time."""

    @property
    def keys(self) -> Collection[RequestKey]: ...

    def take_notice(self, notice: SendingNotice) -> None:
        """The sending side is done with a handoff that is not the other leg's."""
        ...


class MixedLeg:
    """Both legs of a mixed node. `prefill` has the sending side of `decode`, which takes its notices."""

    def __init__(self, prefill: PromptLeg, decode: Leg) -> None:
        self._prefill = prefill
        self._decode = decode

    @property
    def num_live(self) -> int:
        """The number of prompts for other nodes, and of requests that are generated here."""
        return self._prefill.num_live + self._decode.num_live

    def live_keys(self) -> Iterable[RequestKey]:
        """The attempts of both legs."""
        return (*self._prefill.live_keys(), *self._decode.live_keys())

    def wait_on(self) -> Sequence[Any]:
        """The sockets that wake for notices of both sides."""
        return self._decode.wait_on()

    def begin(self, request: Any, now_s: float) -> None:
        """Take either leg of a request. Raises `BatonError`."""
        is_prefill = isinstance(request, Prefill)
        others = self._decode.live_keys() if is_prefill else self._prefill.keys
        if not set(choice_keys(request)).isdisjoint(others):
            raise InvalidMessage("this attempt has the other leg here already")
        (self._prefill if is_prefill else self._decode).begin(request, now_s)

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """The decode leg's answer. Prompts of the prefill leg go on here: 0 for them."""
        if RequestKey(order.handoff_id, order.attempt) in self._prefill.keys:
            return 0
        return self._decode.hand_over(order, now_s)

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Stop the attempt at the leg that has it."""
        self._leg_of(key).cancel(key, now_s)

    def cancel_all(self, now_s: float, owner: bytes = b"") -> None:
        """Stop the attempts of `owner` at both legs."""
        self._prefill.cancel_all(now_s, owner)
        self._decode.cancel_all(now_s, owner)

    def poll(self, now_s: float) -> None:
        """Poll the decode leg; notices of the sending side reach the prefill leg through it."""
        self._decode.poll(now_s)

    def watch(self, step: Step) -> LayerStored | None:
        """Show each leg its own requests of the step. Returns what the prefill leg wants called after each layer."""
        self._decode.watch(step)
        prompts = self._prefill.keys
        if not prompts:
            return self._prefill.watch(_NOTHING)
        return self._prefill.watch(Step(tuple([share for share in step.requests if share.key in prompts])))

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """The events of both legs; each is shown the outputs of its own requests."""
        prompts = self._prefill.keys
        of_prompts = [output for output in outputs if output.key in prompts] if prompts else []
        others = [output for output in outputs if output.key not in prompts] if of_prompts else outputs
        return self._prefill.applied(of_prompts, now_s) + self._decode.applied(others, now_s)

    def sent(self, now_s: float) -> None:
        """Let the prefill leg do what is slow; the decode leg has nothing of that kind."""
        self._prefill.sent(now_s)

    def lost(self, error: BatonError, now_s: float) -> None:
        """Fail the handoffs of both legs that relied on these steps."""
        self._prefill.lost(error, now_s)
        self._decode.lost(error, now_s)

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """The failures of both legs."""
        return self._prefill.take_failures() + self._decode.take_failures()

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """Fail the request at the leg that has it."""
        self._leg_of(key).fail(key, error, now_s)

    def metrics(self) -> Iterable[Metric]:
        """The metrics of the decode leg: both legs count into the same numbers."""
        return self._decode.metrics()

    def _leg_of(self, key: RequestKey) -> Leg:
        return self._prefill if key in self._prefill.keys else self._decode
