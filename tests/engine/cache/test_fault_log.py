"""Faults of a store in the log: said when they begin and when they are over, and not in between."""

from __future__ import annotations

import logging

import pytest

from baton.engine.cache.fault_log import LASTS_S, FaultLog
from tests.engine.scheduler.stores import Clock


def test_a_fault_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = FaultLog("the store")
    for _ in range(2):
        faults.worked("reading")
        for _ in range(3):
            faults.failed("reading", "is broken")
        faults.failed("writing", "is broken")
        faults.worked("reading")
        faults.failed("writing", "is broken, too")
        faults.worked("writing")
        faults.worked("writing")
    assert caplog.messages == ["the store is broken", "the store works again"] * 2


def test_another_fault_meanwhile_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog("the store")
    for reason in ("is broken", "is full", "is broken"):
        faults.failed(reason, reason)
    assert caplog.messages == ["the store is broken", "the store is full"]


def test_a_fault_that_was_long_ago_keeps_no_other_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    faults = FaultLog("the store", clock)
    faults.failed("forgetting", "is broken")
    clock.now_s += LASTS_S
    faults.failed("reading", "is broken")
    faults.worked("reading")
    assert caplog.messages == ["the store is broken", "the store is broken", "the store works again"]
