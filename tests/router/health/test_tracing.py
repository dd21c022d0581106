"""Spans of requests: their shape, which needs no SDK, and what the SDK of OpenTelemetry makes of them."""

from __future__ import annotations

import sys

import pytest

from baton.router.health.tracing import Tracing, child_spans, open_tracing, request_span
from baton.router.requests.timings import RelayTimes
from baton.router.requests.trace import FINISHED, AttemptTrace, FlightTrace, RequestTrace
from baton.wire.errors import InvalidSetting, RequestFailed
from baton.wire.messages.output import StepTimes

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
AT_S, AT_US = 1_700_000_000.0, 5_000_000


def _trace(clock: str = "c", traceparent: str = "") -> RequestTrace:
    """A request of two attempts, the second of which took 900 us and came to 7 tokens."""
    times = RelayTimes(
        clock, AT_US + 50, StepTimes(None, AT_US + 200, AT_US + 300), StepTimes(AT_US + 400, AT_US + 500, 0)
    )
    flight = FlightTrace("job-7", "ab" * 16, 0, 20, times, num_output_tokens=7, end=FINISHED, ended_us=AT_US + 950)
    flight.attempts = [
        AttemptTrace(AT_US + 10, "p1", "d1", AT_US + 50, RequestFailed.code),
        AttemptTrace(AT_US + 50, "p2", "d1", AT_US + 950, FINISHED),
    ]
    return RequestTrace(
        "job-7", "/v1/completions", traceparent, AT_US, AT_S, "m", 20, AT_US + 310, AT_US + 1000, 200, [flight]
    )


def _offsets_us(start_ns: int, end_ns: int) -> tuple[int, int]:
    base_ns = round(AT_S * 1e9)
    return (start_ns - base_ns) // 1000, (end_ns - base_ns) // 1000


def test_the_span_of_a_request_has_its_counts_and_times() -> None:
    span = request_span(_trace())
    assert _offsets_us(span.start_ns, span.end_ns) == (0, 1000)
    assert span.attributes["gen_ai.request.id"] == "job-7"
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 20
    assert span.attributes["gen_ai.usage.completion_tokens"] == 7
    assert span.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(310e-6)
    assert not span.has_failed


def test_attempts_and_phases_are_spans_of_their_own() -> None:
    spans = [(span.name, *_offsets_us(span.start_ns, span.end_ns), span.has_failed) for span in child_spans(_trace())]
    assert spans == [
        ("attempt", 10, 50, True),
        ("attempt", 50, 950, False),
        ("prefill", 200, 300, False),
        ("kv_transfer", 300, 400, False),
        ("decode", 500, 950, False),
    ]


def test_stamps_of_another_clock_make_no_spans() -> None:
    assert {span.name for span in child_spans(_trace(clock=""))} == {"attempt"}


def test_the_sdk_gets_one_trace_below_that_of_the_caller() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    tracing.observe(_trace(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01"))
    *children, outer = exporter.get_finished_spans()
    assert {format(span.context.trace_id, "032x") for span in (outer, *children)} == {TRACE_ID}
    assert format(outer.parent.span_id, "016x") == PARENT_ID
    assert {span.parent.span_id for span in children} == {outer.context.span_id}
    assert [span.status.is_ok for span in children] == [False, True, True, True, True]
    assert outer.attributes["gen_ai.response.model"] == "m"
    exporter.clear()
    tracing.observe(_trace(traceparent="junk"))
    *_, outer = exporter.get_finished_spans()
    assert outer.parent is None
    tracing.close()


def test_without_the_extra_the_setting_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidSetting, match=r"baton-serve\[otel\]"):
        open_tracing("http://127.0.0.1:4318/v1/traces")
