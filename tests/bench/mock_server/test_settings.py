from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.mock_server.settings import MockServerSettings, options_of, schedule_of

from bench.mock_server.schedule import Fault, FaultKind, Steady
from bench.mock_server.server import MockOptions
from wire.errors import InvalidSetting


def test_settings_become_a_schedule() -> None:
    settings = MockServerSettings(ttft_ms=40, itl_ms=8, jitter=0.1, tokens_per_chunk=2, text="x", seed=3)
    assert schedule_of(settings) == Steady(0.04, 0.008, 0.1, 2, "x", None, 1.0, 3)
    broken = replace(settings, fault="http-error", fault_share=0.5, fault_after_chunks=2, fault_status=500)
    assert schedule_of(broken).fault == Fault(FaultKind.HTTP_ERROR, 2, 500)
    assert schedule_of(broken).fault_share == 0.5


def test_settings_become_options() -> None:
    settings = MockServerSettings(host="::1", port=0, model="m", owned_by="baton")
    assert options_of(settings) == MockOptions("::1", 0, "m", "baton", max_records=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttft_ms": -1.0}, "--ttft-ms -1.0 is below 0"),
        ({"itl_ms": -1.0}, "--itl-ms -1.0 is below 0"),
        ({"fault_after_chunks": -1}, "--fault-after-chunks -1 is below 0"),
        ({"jitter": 1.5}, "--jitter 1.5 is no share"),
        ({"fault_share": -0.5}, "--fault-share -0.5 is no share"),
        ({"tokens_per_chunk": 0}, "--tokens-per-chunk 0 is not at least 1"),
        ({"fault_status": 200}, "--fault-status 200 is no status of an error"),
    ],
)
def test_what_cannot_be_answered_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        schedule_of(MockServerSettings(**changes))
