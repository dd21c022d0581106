"""OpenTelemetry spans of requests, made from their records when they have ended: no token costs anything.

Owns the shape of the spans. A request is one span, a child of the caller's if it sent a `traceparent`; below it are its
attempts and, where the nodes' clock is the router's, prefill, KV transfer and decode of each choice. The OpenTelemetry
SDK is an extra: it is imported by `open_tracing` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.router.requests.trace import FINISHED, FlightTrace, RequestTrace
from baton.wire.errors import InvalidSetting

_EXPORT_TIMEOUT_S = 2
Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span below that of the request, or that span. Times are nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    has_failed: bool = False


def request_span(trace: RequestTrace) -> SpanRecord:
    """The span of an ended request. Names of attributes are those of the GenAI conventions where there is one."""
    attributes: dict[str, str | int | float | None] = {
        "gen_ai.request.id": trace.request_id,
        "gen_ai.response.model": trace.model,
        "gen_ai.usage.prompt_tokens": trace.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(flight.num_output_tokens for flight in trace.flights),
        "gen_ai.latency.time_to_first_token": trace.after_us(trace.first_token_us),
        "gen_ai.latency.e2e": trace.after_us(trace.ended_us),
        "http.route": trace.path,
        "http.response.status_code": trace.status,
        "baton.end": trace.end,
        "baton.num_attempts": trace.num_attempts,
    }
    known = {name: value for name, value in attributes.items() if value is not None}
    start_ns, end_ns = _unix_ns(trace, trace.received_us), _unix_ns(trace, trace.ended_us or trace.received_us)
    return SpanRecord("llm_request", start_ns, end_ns, known, trace.end != FINISHED)


def child_spans(trace: RequestTrace) -> list[SpanRecord]:
    """The spans below that of the request."""
    return [span for flight in trace.flights for span in (*_attempts(trace, flight), *_phases(trace, flight))]


def _attempts(trace: RequestTrace, flight: FlightTrace) -> list[SpanRecord]:
    return [
        SpanRecord(
            "attempt",
            _unix_ns(trace, attempt.sent_us),
            _unix_ns(trace, attempt.ended_us or attempt.sent_us),
            {
                "baton.choice": flight.index,
                "baton.handoff_id": flight.handoff_id,
                "baton.prefill_node": attempt.prefill_node,
                "baton.decode_node": attempt.decode_node,
                "baton.end": attempt.end,
            },
            attempt.end != FINISHED,
        )
        for attempt in flight.attempts
    ]


def _phases(trace: RequestTrace, flight: FlightTrace) -> list[SpanRecord]:
    times, stamps = flight.times, list[tuple[str, int | None, int | None]]()
    if times.clock and times.first is not None:
        stamps.append(("prefill", times.first.begun_us, times.first.sampled_us))
        if times.second is not None:
            stamps.append(("kv_transfer", times.first.sampled_us, times.second.ready_us))
            stamps.append(("decode", times.second.begun_us, flight.ended_us))
    return [
        SpanRecord(name, _unix_ns(trace, start_us), _unix_ns(trace, end_us), {"baton.choice": flight.index})
        for name, start_us, end_us in stamps
        if start_us is not None and end_us is not None and start_us <= end_us
    ]


def _unix_ns(trace: RequestTrace, at_us: int) -> int:
    return round(trace.received_at_s * 1e9) + (at_us - trace.received_us) * 1000


class Tracing:
    """Writes the spans of ended requests to `provider`, an OpenTelemetry `TracerProvider`."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, trace: RequestTrace) -> None:
        """Hand over the spans of an ended request; they are sent by a thread of the SDK."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        caller = self._propagator.extract({"traceparent": trace.traceparent}) if trace.traceparent else None
        record = request_span(trace)
        outer = self._start(record, caller, SpanKind.SERVER)
        inside = set_span_in_context(outer)
        for child in child_spans(trace):
            self._start(child, inside, SpanKind.INTERNAL).end(end_time=child.end_ns)
        outer.end(end_time=record.end_ns)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.shutdown()

    def _start(self, record: SpanRecord, context: Any, kind: Any) -> Any:
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(
            record.name, context=context, kind=kind, attributes=dict(record.attributes), start_time=record.start_ns
        )
        if record.has_failed:
            span.set_status(Status(StatusCode.ERROR, str(record.attributes.get("baton.end", ""))))
        return span


def open_tracing(endpoint: str) -> Tracing:
    """Spans that go to `endpoint` as OTLP over HTTP. Raises `InvalidSetting` when the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InvalidSetting("--otlp-traces-endpoint needs an extra: pip install 'baton-serve[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "baton-router"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)))
    return Tracing(provider)
