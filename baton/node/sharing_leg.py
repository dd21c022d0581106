"""A node's leg, and beside it what the node shares of its prefix cache with other nodes.

Owns nothing but the three: the leg of the role, prefixes that are lent, and prefixes that are borrowed, which a node
may not be able to. All of them use the same engine and the same ends; each is shown the notices of its own handoffs
(`baton.node.notices`). A request for which a prefix is borrowed is the leg's from the beginning: it stands in its place
in the engine's queue, and is held back there until the prefix has come.

Invariant: a key is of one of them at most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric

from baton.engine.attention.base import LayerStored
from baton.engine.scheduler.step import RequestOutput, Step
from baton.node.borrower import Arrived, PrefixBorrower
from baton.node.choices import choice_keys
from baton.node.lender import PrefixLender
from baton.node.loop import Leg
from baton.wire.errors import BatonError, InvalidMessage
from baton.wire.messages.legs import HandOver
from baton.wire.messages.output import TokenEvent
from baton.wire.messages.prefixes import Lend, Pull
from baton.wire.request_key import RequestKey


class SharingLeg:
    """`leg` with a `lender`, and a `borrower` where this node can take prefixes."""

    def __init__(self, leg: Leg, lender: PrefixLender, borrower: PrefixBorrower | None) -> None:
        self._leg, self._lender, self._borrower = leg, lender, borrower
        self._borrowed: Collection[RequestKey] = () if borrower is None else borrower.keys

    @property
    def can_pull(self) -> bool:
        """Whether it takes prefixes from other nodes."""
        return self._borrower is not None

    @property
    def num_live(self) -> int:
        """Requests and handoffs of the leg, and prefixes that are lent or on their way here."""
        return self._leg.num_live + len(self._lender.keys) + len(self._borrowed)

    def live_keys(self) -> Iterable[RequestKey]:
        """The attempts of the leg, and those of pulls at either end."""
        return (*self._leg.live_keys(), *self._lender.keys, *self._borrowed)

    def wait_on(self) -> Sequence[Any]:
        """The sockets of the leg, and the one of the receiving side, which the leg may not have."""
        wakeups = [] if self._borrower is None else [self._borrower.wakeup]
        return list(dict.fromkeys([*self._leg.wait_on(), *wakeups]))

    def begin(self, request: Any, now_s: float) -> None:
        """Take a leg of a request, or a prefix. Raises `BatonError`."""
        if isinstance(request, Pull):
            if self._borrower is None:
                raise InvalidMessage("this node takes no prefixes")
            self._borrower.begin(request)
            return
        key, *forks = choice_keys(request)
        if any(each in self._lender.keys or each in self._borrowed for each in (key, *forks)):
            raise InvalidMessage("this attempt of the request is a pull")
        self._leg.begin(request, now_s)
        if request.awaited is not None and self._borrower is not None:
            self._borrower.hold_back(key, request.awaited, now_s)

    def lend(self, order: Lend, now_s: float) -> int:
        """Hand over what is cached of a prompt's beginning. How many tokens; 0: none."""
        return self._lender.lend(order, now_s)

    def take_arrived(self) -> list[Arrived]:
        """The prefixes that have come since the last call."""
        return [] if self._borrower is None else self._borrower.take_arrived()

    def hand_over(self, order: HandOver, now_s: float) -> int:
        """The leg's answer."""
        return self._leg.hand_over(order, now_s)

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Stop the attempt, whatever it is."""
        self._lender.cancel(key)
        if self._borrower is not None:
            self._borrower.cancel(key)
        self._leg.cancel(key, now_s)

    def cancel_all(self, now_s: float, owner: bytes = b"") -> None:
        """Stop everything of `owner`."""
        for key in [key for key in self._lender.keys if key.handoff_id.startswith(owner)]:
            self._lender.cancel(key)
        if self._borrower is not None:
            self._borrower.cancel_all(owner)
        self._leg.cancel_all(now_s, owner)

    def poll(self, now_s: float) -> None:
        """Take the notices of all. Raises `BatonError` when transfers cannot go on."""
        self._lender.poll()
        if self._borrower is not None:
            self._borrower.poll(now_s)
        self._leg.poll(now_s)

    def watch(self, step: Step) -> LayerStored | None:
        """What the leg wants called after each layer: prefixes have nothing in a step."""
        return self._leg.watch(step)

    def applied(self, outputs: Sequence[RequestOutput], now_s: float) -> list[TokenEvent]:
        """The events of the leg."""
        return self._leg.applied(outputs, now_s)

    def sent(self, now_s: float) -> None:
        """Let the leg do what is slow."""
        self._leg.sent(now_s)

    def lost(self, error: BatonError, now_s: float) -> None:
        """Fail what relied on these steps: no prefix did."""
        self._leg.lost(error, now_s)

    def take_failures(self) -> list[tuple[RequestKey, BatonError]]:
        """The failures of the leg, and of prefixes that will not come."""
        failures = [] if self._borrower is None else self._borrower.take_failures()
        return failures + self._leg.take_failures()

    def fail(self, key: RequestKey, error: BatonError, now_s: float) -> None:
        """Fail a request of the leg."""
        self._leg.fail(key, error, now_s)

    def metrics(self) -> Iterable[Metric]:
        """Those of the leg."""
        return self._leg.metrics()
