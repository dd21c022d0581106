"""Requests that are taken apart by stamps made up here, and those that are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.bench.breakdown import TTFT_PARTS, TTST_PARTS, Breakdown, breakdown_of, summarise_breakdowns
from baton.bench.client.outcome import Outcome
from baton.runtime.clock import host_clock

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


def later(name: str, by_us: int) -> dict[str, int]:
    """One stamp of `timings`, moved."""
    return {name: timings()[name] + by_us}


def answered(index: int = 0, stamps: dict[str, Any] | None = None, **changes: Any) -> Outcome:
    """A complete request of three tokens: token 1 came after 39.5 ms, token 2 after 49.5 ms."""
    outcome = Outcome(
        index=index,
        url="http://x",
        scheduled_s=SENT_S,
        sent_s=SENT_S,
        chunk_s=[SENT_S + 0.0395, SENT_S + 0.0495, SENT_S + 0.0600],
        chunk_tokens=[1, 1, 1],
        num_output_tokens=3,
        usage={"timings": timings() if stamps is None else stamps},
    )
    for name, value in changes.items():
        setattr(outcome, name, value)
    return outcome


def taken_apart(outcome: Outcome) -> Breakdown:
    found = breakdown_of(outcome)
    assert found is not None
    return found


def reason_of(outcome: Outcome) -> str:
    """Why `outcome` is left out."""
    assert breakdown_of(outcome) is None
    summary = summarise_breakdowns([answered(), outcome])
    assert summary is not None
    assert (summary["num_requests"], summary["num_left_out"]) == (1, 1)
    ((reason, count),) = summary["left_out"].items()
    assert count == 1
    return str(reason)


def test_parts_are_the_times_between_the_stations() -> None:
    found = taken_apart(answered())
    assert dict(zip(TTFT_PARTS, found.ttft.parts_ms, strict=True)) == pytest.approx(TTFT)
    assert found.ttst is not None
    assert dict(zip(TTST_PARTS, found.ttst.parts_ms, strict=True)) == pytest.approx(TTST)


def test_without_a_handoff_no_transfer_is_exposed() -> None:
    found = taken_apart(answered(stamps=timings(kv_ready_us=None)))
    assert found.ttst is not None
    parts = dict(zip(TTST_PARTS, found.ttst.parts_ms, strict=True))
    assert (parts["exposed_transfer"], parts["queue_decode"]) == pytest.approx((0.0, 1.75))
    assert sum(found.ttst.parts_ms) == pytest.approx(49.5)


def test_a_client_with_another_clock_has_what_is_left_of_the_measured_time() -> None:
    far_s = 77_000.0
    outcome = answered(sent_s=far_s, chunk_s=[far_s + 0.0395, far_s + 0.0495, far_s + 0.06])
    outcome.usage["timings"]["clock"] = "ffffffff"
    found = taken_apart(outcome)
    assert dict(zip(TTFT_PARTS, found.ttft.parts_ms, strict=True)) == pytest.approx(TTFT)
    assert sum(found.ttft.parts_ms) == pytest.approx(39.5)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: answered(usage={}), "no timings"),
        (lambda: answered(usage={"timings": "soon"}), "no timings"),
        (lambda: answered(stamps=timings(attempts=2)), "more than one attempt"),
        (lambda: answered(stamps=timings(first_written_us=None)), "a stamp is missing"),
        (lambda: answered(stamps=timings(second_sampled_us=None)), "a stamp is missing"),
        (lambda: answered(stamps=timings(sent_us="1")), "a stamp is missing"),
        (lambda: answered(chunk_tokens=[2, 1, 1]), "the first tokens did not come one by one"),
        (lambda: answered(chunk_tokens=[1, 2, 1]), "the first tokens did not come one by one"),
        (lambda: answered(chunk_tokens=[0, 0, 0]), "the first tokens did not come one by one"),
        (lambda: answered(chunk_s=[SENT_S + 0.0395], chunk_tokens=[1]), "the first tokens did not come one by one"),
        (lambda: answered(stamps=timings(**later("first_sampled_us", 900))), "stamps in the wrong order"),
        (lambda: answered(stamps=timings(**later("received_us", -1300))), "stamps in the wrong order"),
        (
            lambda: answered(chunk_s=[SENT_S + 0.0370, SENT_S + 0.0495], chunk_tokens=[1, 1]),
            "stamps in the wrong order",
        ),
        (lambda: answered(sent_s=SENT_S + 1), "stamps in the wrong order"),
    ],
)
def test_a_request_that_cannot_be_taken_apart_is_left_out_and_counted(make: Callable[[], Outcome], reason: str) -> None:
    assert reason_of(make()) == reason


def test_a_summary_of_several_requests() -> None:
    waited = {name: timings()[name] + 2000 for name in timings() if name.endswith("_us")} | {
        name: timings()[name] for name in ("received_us", "sent_us")
    }
    slow = answered(7, timings(**waited), chunk_s=[SENT_S + 0.0415, SENT_S + 0.0515, SENT_S + 0.0620])
    summary = summarise_breakdowns([answered(3), answered(4), slow])
    assert summary is not None
    queue = summary["ttft"]["parts"]["queue_prefill"]
    assert queue == {"mean_ms": 4.667, "median_ms": 4.0, "p99_ms": 5.96}
    assert summary["ttft"]["parts"]["prefill"]["mean_ms"] == 30.0
    assert (summary["ttft"]["measured_mean_ms"], summary["ttft"]["sum_mean_ms"]) == (40.167, 40.167)
    assert summary["ttft"]["largest_error"] < 1e-6
    assert list(summary["ttst"]["parts"]) == list(TTST_PARTS)
