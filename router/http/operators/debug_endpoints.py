"""`/debug/requests`: the recent requests of a router, and one of them in detail, as JSON.

Owns how a record looks to a person. Times of nodes are shown only where all programs of the request share a clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from aiohttp import web

from baton.router.http.openai.errors import INVALID, envelope
from baton.router.http.openai.replies import json_bytes
from baton.router.http.request_log import RequestLog, request_fields
from baton.router.requests.trace import FlightTrace, RequestTrace

_MAX_LISTED = 100
_MAX_FOUND = 10


@dataclass(frozen=True, slots=True)
class DebugEndpoints:
    """The handlers. They show other people's requests, although no text of them."""

    requests: RequestLog

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_get("/debug/requests", self.list_requests)
        app.router.add_get("/debug/requests/{name}", self.show_request)

    async def list_requests(self, http: web.Request) -> web.Response:
        """`GET /debug/requests`: one line each, newest first, those in flight before those that ended."""
        recent = self.requests.recent()[:_MAX_LISTED]
        return _json({"object": "list", "data": [request_fields(_counted(trace)) for trace in recent]})

    async def show_request(self, http: web.Request) -> web.Response:
        """`GET /debug/requests/{id}`: all requests with that id, because a client may use one twice."""
        found = self.requests.find(http.match_info["name"])[:_MAX_FOUND]
        if not found:
            message = "no request with this id is in flight or among the last ones that ended"
            return _json(envelope(message, INVALID, None, "not_found"), 404)
        return _json({"object": "list", "data": [timeline(trace) for trace in found]})


def timeline(trace: RequestTrace) -> dict[str, object]:
    """Everything that is known of one request. Moments are seconds after its arrival at the router."""
    fields = request_fields(_counted(trace))
    return {**fields, "received_at_s": trace.received_at_s, "choices": [_choice(trace, each) for each in trace.flights]}


def _choice(trace: RequestTrace, flight: FlightTrace) -> dict[str, object]:
    return {
        "index": flight.index,
        "handoff_id": flight.handoff_id,
        "end": flight.end,
        "finish_reason": flight.finish_reason,
        "num_prompt_tokens": flight.num_prompt_tokens,
        "num_cached_tokens": flight.num_cached_tokens,
        "num_output_tokens": flight.num_output_tokens,
        "kv_transfer": None if flight.handoff is None else asdict(flight.handoff),
        "attempts": [
            {
                "prefill_node": attempt.prefill_node,
                "decode_node": attempt.decode_node,
                "sent_s": trace.after_us(attempt.sent_us),
                "ended_s": trace.after_us(attempt.ended_us),
                "end": attempt.end,
            }
            for attempt in flight.attempts
        ],
        "timeline": [{"event": event, "at_s": trace.after_us(at_us)} for event, at_us in moments(trace, flight)],
    }


def moments(trace: RequestTrace, flight: FlightTrace) -> list[tuple[str, int]]:
    """(event, microseconds) of one choice in order of time, as far as they are known."""
    times, stamps = flight.times, [("received", trace.received_us), ("ended", flight.ended_us)]
    stamps += [("legs_sent", attempt.sent_us) for attempt in flight.attempts]
    if times.clock and times.first is not None:
        stamps += [("prefill_begun", times.first.begun_us), ("token_1_sampled", times.first.sampled_us)]
    if times.clock and times.second is not None:
        second = times.second
        stamps += [("kv_ready", second.ready_us), ("decode_begun", second.begun_us)]
        stamps += [("token_2_sampled", second.sampled_us)]
    known = [(event, at_us) for event, at_us in stamps if at_us is not None]
    return sorted(known, key=lambda moment: moment[1])


def _counted(trace: RequestTrace) -> RequestTrace:
    for flight in trace.flights:
        flight.so_far()
    return trace


def _json(payload: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(status=status, body=json_bytes(payload), content_type="application/json")
