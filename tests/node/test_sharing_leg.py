"""A leg beside which prefixes are lent and borrowed: each message reaches the one that it is of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from baton.kvtransfer.commands import CancelReceiving, CancelSending, Delivered, Failed, Released
from baton.node.borrower import PrefixBorrower
from baton.node.lender import PrefixLender
from baton.node.loop import Leg
from baton.node.sharing_leg import SharingLeg
from baton.wire.errors import InvalidMessage, RequestFailed
from baton.wire.messages.legs import Decode
from baton.wire.messages.output import HandoffFigures
from baton.wire.messages.prefixes import AwaitedPrefix
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.node.sharing import PROMPT, cache, lend, make_core, pull, receiving_end, sending_end
from tests.request_keys import A, B, C


class Stage:
    """A leg that notes its calls, and the ends that it shares."""

    def __init__(self, *, can_pull: bool = True) -> None:
        self.core = make_core()
        self.calls: list[Any] = []
        sent, self.sending, self.sent_notices = sending_end()
        received, self.receiving, self.received_notices = receiving_end()
        self.lender, self.borrower = PrefixLender(self.core, sent), PrefixBorrower(self.core, received)
        failure = (C, RequestFailed("the leg's own"))
        inner = SimpleNamespace(
            num_live=1,
            live_keys=lambda: [C],
            begin=lambda request, now_s: self.calls.append(("begin", request, now_s)),
            cancel=lambda key, now_s: self.calls.append(("cancel", key)),
            cancel_all=lambda now_s, owner: self.calls.append(("cancel_all", owner)),
            poll=lambda now_s: self.calls.append("poll"),
            take_failures=lambda: [failure],
            wait_on=lambda: [self.lender.rest.notices.wakeup],
        )
        self.leg = SharingLeg(cast(Any, inner), self.lender, self.borrower if can_pull else None)
        cache(self.core, PROMPT.first(8), B)


def leg_of(key: RequestKey) -> Decode:
    return Decode(*key, PROMPT, DecodingParams(), None)


def test_what_is_lent_and_borrowed_is_alive_until_it_is_over() -> None:
    stage, pulled = Stage(), RequestKey(B.handoff_id, 2)
    leg = stage.leg
    assert leg.lend(lend(A), 0.0) == 8
    leg.begin(pull(pulled), 0.0)
    assert (leg.num_live, set(leg.live_keys())) == (3, {A, pulled, C})
    stage.sent_notices.put(Released(A))
    stage.received_notices.put(Delivered(pulled, (), HandoffFigures(1, 1, 1, 1), 1))
    leg.poll(0.0)
    assert stage.calls == ["poll"]
    assert [arrived.key for arrived in leg.take_arrived()] == [pulled]
    assert (leg.num_live, set(leg.live_keys())) == (1, {C})
    stage.core.check()


def test_an_attempt_is_a_pull_or_a_leg_and_never_both() -> None:
    stage = Stage()
    stage.leg.lend(lend(A), 0.0)
    stage.leg.begin(pull(B), 0.0)
    for key in (A, B):
        with pytest.raises(InvalidMessage, match="is a pull"):
            stage.leg.begin(leg_of(key), 0.0)
    stage.leg.begin(leg_of(C), 1.0)
    assert stage.calls == [("begin", leg_of(C), 1.0)]


def test_a_leg_that_is_pulled_for_is_held_back_where_the_node_can_pull() -> None:
    for can_pull in (True, False):
        stage = Stage(can_pull=can_pull)
        stage.core.add(A, PROMPT, DecodingParams(max_tokens=1))
        stage.leg.begin(replace(leg_of(A), awaited=AwaitedPrefix(2, 1.0, 0.0)), 5.0)
        assert stage.core.awaits_readiness == can_pull
        stage.leg.poll(6.0)
        assert not stage.core.awaits_readiness
        assert [key for key, _ in stage.leg.take_failures()] == [RequestKey(A.handoff_id, 2)] * can_pull + [C]


def test_a_cancel_reaches_whatever_has_that_key() -> None:
    stage = Stage()
    stage.leg.lend(lend(A), 0.0)
    stage.leg.begin(pull(B), 0.0)
    for key in (A, B, C):
        stage.leg.cancel(key, 0.0)
    assert CancelSending(A, "cancelled") in stage.sending.commands
    assert CancelReceiving(B) in stage.receiving.commands
    assert stage.calls == [("cancel", A), ("cancel", B), ("cancel", C)]


def test_a_router_that_is_gone_takes_all_of_its_own_along() -> None:
    stage = Stage()
    stage.leg.lend(lend(A), 0.0)
    stage.leg.begin(pull(B), 0.0)
    stage.leg.cancel_all(0.0, b"")
    assert CancelSending(A, "cancelled") in stage.sending.commands
    assert CancelReceiving(B) in stage.receiving.commands
    assert [key for key, _ in stage.leg.take_failures()] == [B, C]


def test_a_prefix_that_fails_is_a_failure_of_its_attempt() -> None:
    stage = Stage()
    stage.leg.begin(pull(B), 0.0)
    stage.received_notices.put(Failed(B, "as the test says"))
    stage.leg.poll(0.0)
    assert [str(error) for _, error in stage.leg.take_failures()] == ["as the test says", "the leg's own"]


def test_the_loop_waits_for_both_ends_also_where_the_leg_has_one() -> None:
    stage = Stage()
    assert stage.leg.wait_on() == [stage.sent_notices.wakeup, stage.received_notices.wakeup]


def test_a_node_that_cannot_pull_says_so_and_lends() -> None:
    stage = Stage(can_pull=False)
    assert not stage.leg.can_pull
    with pytest.raises(InvalidMessage, match="takes no prefixes"):
        stage.leg.begin(pull(A), 0.0)
    assert stage.leg.lend(lend(A), 0.0) == 8
    assert stage.leg.take_arrived() == []


@pytest.mark.parametrize("name", ["hand_over", "watch", "applied", "sent", "lost", "fail", "metrics"])
def test_what_is_of_the_leg_alone_is_passed_on(name: str) -> None:
    inner = create_autospec(Leg, instance=True)
    arguments = {"hand_over": ("order", 1.0), "watch": ("step",), "sent": (1.0,), "fail": (A, "error", 1.0)}
    passed = arguments.get(name, () if name == "metrics" else ("what", 1.0))
    answer = getattr(SharingLeg(inner, Stage().lender, None), name)(*passed)
    method = getattr(inner, name)
    method.assert_called_once_with(*passed)
    assert answer is (None if name in ("sent", "lost", "fail") else method.return_value)
