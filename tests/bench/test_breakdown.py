"""Requests that are taken apart by stamps made up here, and those that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.bench.breakdown import TTFT_PARTS, TTST_PARTS, Breakdown, breakdown_of, summarise_breakdowns
from baton.bench.client.outcome import Outcome
from baton.runtime.clock import host_clock
from tests.bench.serve.outcomes import answered

SENT_S = 1000.0
TTFT = {"client": 3.0, "router": 2.0, "queue_prefill": 4.0, "prefill": 30.0, "return": 0.5}
TTST = TTFT | {"exposed_transfer": 1.5, "queue_decode": 0.25, "first_decode_step": 8.0, "return_second": 0.75}
TTST.pop("return")


def timings(**changes: Any) -> dict[str, Any]:
    """Stamps of a request whose parts are those above: 1 ms to the router, 2 ms from it, all after `SENT_S`."""
    at_ms = {
        "received_us": 1.0,
        "sent_us": 3.0,
        "prefill_begun_us": 7.0,
        "first_sampled_us": 37.0,
        "first_written_us": 37.5,
        "kv_ready_us": 38.5,
        "decode_begun_us": 38.75,
        "second_sampled_us": 46.75,
        "second_written_us": 47.5,
    }
    stamps = {name: round(SENT_S * 1e6 + ms * 1e3) for name, ms in at_ms.items()}
    return {"clock": host_clock(), "attempts": 1, **stamps, **changes}


def asked(stamps: dict[str, Any] | None = None, **changes: Any) -> Outcome:
    """A complete request of three tokens: token 1 came after 39.5 ms, token 2 after 49.5 ms."""
    outcome = answered([0.0395, 0.0495, 0.06], sent_s=SENT_S, timings=timings() if stamps is None else stamps)
    for name, value in changes.items():
        setattr(outcome, name, value)
    return outcome


def taken_apart(outcome: Outcome) -> Breakdown:
    found = breakdown_of(outcome)
    assert found is not None
    return found


def test_parts_are_the_times_between_the_stations() -> None:
    found = taken_apart(asked())
    assert dict(zip(TTFT_PARTS, found.ttft.parts_ms, strict=True)) == pytest.approx(TTFT)
    assert found.ttst is not None
    assert dict(zip(TTST_PARTS, found.ttst.parts_ms, strict=True)) == pytest.approx(TTST)


def test_without_a_handoff_no_transfer_is_exposed() -> None:
    found = taken_apart(asked(stamps=timings(kv_ready_us=None)))
    assert found.ttst is not None
    parts = dict(zip(TTST_PARTS, found.ttst.parts_ms, strict=True))
    assert (parts["exposed_transfer"], parts["queue_decode"]) == pytest.approx((0.0, 1.75))
    assert sum(found.ttst.parts_ms) == pytest.approx(49.5)


def test_a_client_with_another_clock_has_what_is_left_of_the_measured_time() -> None:
    far_s = 77_000.0
    outcome = asked(sent_s=far_s, chunk_s=[far_s + 0.0395, far_s + 0.0495, far_s + 0.06])
    outcome.usage["timings"]["clock"] = "ffffffff"
    found = taken_apart(outcome)
    assert dict(zip(TTFT_PARTS, found.ttft.parts_ms, strict=True)) == pytest.approx(TTFT)
    assert sum(found.ttft.parts_ms) == pytest.approx(39.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: asked(usage={}),
        lambda: asked(usage={"timings": "soon"}),
        lambda: asked(stamps=timings(attempts=2)),
        lambda: asked(stamps=timings(first_written_us=None)),
        lambda: asked(stamps=timings(second_sampled_us=None)),
        lambda: asked(stamps=timings(sent_us="1")),
        lambda: asked(chunk_tokens=[2, 1, 1]),
        lambda: asked(chunk_tokens=[1, 2, 1]),
        lambda: asked(chunk_tokens=[0, 0, 0]),
        lambda: asked(chunk_s=[SENT_S + 0.0395], chunk_tokens=[1]),
        lambda: asked(stamps=timings(first_sampled_us=timings()["first_sampled_us"] + 900)),
        lambda: asked(stamps=timings(received_us=timings()["received_us"] - 1300)),
        lambda: asked(chunk_s=[SENT_S + 0.0370, SENT_S + 0.0495], chunk_tokens=[1, 1]),
        lambda: asked(sent_s=SENT_S + 1),
    ],
)
def test_a_request_that_cannot_be_taken_apart_is_left_out_and_counted(make: Callable[[], Outcome]) -> None:
    assert breakdown_of(make()) is None
    summary = summarise_breakdowns([asked(), make()])
    assert summary is not None
    assert (summary["num_requests"], summary["num_left_out"]) == (1, 1)


def test_a_summary_of_several_requests() -> None:
    waited = {name: timings()[name] + 2000 for name in timings() if name.endswith("_us")} | {
        name: timings()[name] for name in ("received_us", "sent_us")
    }
    slow = asked(timings(**waited), chunk_s=[SENT_S + 0.0415, SENT_S + 0.0515, SENT_S + 0.0620])
    summary = summarise_breakdowns([asked(), asked(), slow])
    assert summary is not None
    queue = summary["ttft"]["parts"]["queue_prefill"]
    assert queue == {"mean_ms": 4.667, "median_ms": 4.0, "p99_ms": 5.96}
    assert summary["ttft"]["parts"]["prefill"]["mean_ms"] == 30.0
    assert summary["ttft"]["measured_mean_ms"] == 40.167
    assert summary["ttft"]["largest_error"] < 1e-6
    assert list(summary["ttst"]["parts"]) == list(TTST_PARTS)
