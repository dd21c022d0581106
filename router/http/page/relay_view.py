"""What the page shows of a relay, as one JSON document: nodes, requests on their legs, the last ends and failures.

Owns the bounds of a document and how often one is made: never more than once per `INTERVAL_S`, whatever the number of
those who look, and only when somebody asks. It reads what the router keeps anyway, and notes nothing itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from baton.router.health.metrics import RouterMetrics
from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.replies import json_bytes
from baton.router.http.operators.operations import node_info
from baton.router.http.page.last_ends import LastEnds
from baton.router.http.page.rows import LEGS, PREFILL, QUEUED, TRANSFER, failure_row, leg_of, request_row
from baton.router.http.request_log import RequestLog
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.trace import RequestTrace
from baton.runtime.clock import now_us
from baton.wire.messages.membership import PREFILL as PREFILL_ROLE

INTERVAL_S = 0.25
MAX_NODES = 64
MAX_ROWS = 32
MAX_COUNTED = 256
MAX_EDGES = 64


@dataclass(slots=True)
class RelayView:
    """Makes the document. `read` is what a watcher calls; the same bytes mean that nothing has changed."""

    endpoints: Endpoints
    nodes: NodeRegistry
    requests: RequestLog
    metrics: RouterMetrics
    ends: LastEnds = field(default_factory=LastEnds)
    clock: Callable[[], float] = time.monotonic
    num_made: int = 0
    _made_s: float = float("-inf")
    _document: bytes = b"{}"

    @property
    def is_over(self) -> bool:
        """Whether the router is shutting down and nothing runs any more."""
        return self.endpoints.is_draining and not self.endpoints.relay.num_in_flight

    def read(self) -> bytes:
        """The document, at most `INTERVAL_S` old."""
        now_s = self.clock()
        if now_s - self._made_s >= INTERVAL_S:
            self._made_s, self._document = now_s, json_bytes(self._make())
            self.num_made += 1
        return self._document

    def _make(self) -> dict[str, object]:
        at_us = now_us()
        in_flight = takewhile(lambda trace: trace.ended_us is None, self.requests.recent())
        running = list(islice(in_flight, MAX_COUNTED))
        nodes = sorted(self.nodes.all(), key=lambda node: (node.role != PREFILL_ROLE, node.node_id))
        return {
            "router": self._router(),
            "num_nodes": len(nodes),
            "nodes": [node_info(node) for node in nodes[:MAX_NODES]],
            "num_counted": len(running),
            "legs": _count_legs(running),
            "edges": _edges(running),
            "requests": [request_row(trace, at_us) for trace in running[:MAX_ROWS]],
            "ended": [request_row(trace, at_us) for trace in reversed(self.ends.ended)],
            "failures": [failure_row(trace) for trace in reversed(self.ends.failures)],
        }

    def _router(self) -> dict[str, object]:
        relay, admission = self.endpoints.relay, self.endpoints.admission
        return {
            "is_draining": self.endpoints.is_draining,
            "num_in_flight": relay.num_in_flight,
            "num_waiting": admission.num_waiting + relay.node_wait.num_waiting,
            "num_tokens": sum(self.metrics.of_model(name).tokens.num_tokens for name in self.endpoints.served),
            "num_requests": relay.counters.num_requests,
            "num_failed": self.ends.num_failed,
            "num_refused": self.ends.num_refused,
            "num_retries": relay.counters.num_retries,
        }


def _count_legs(running: Sequence[RequestTrace]) -> dict[str, int]:
    counts = Counter(leg_of(trace) for trace in running)
    return {leg: counts[leg] for leg in LEGS}


def _edges(running: Sequence[RequestTrace]) -> list[list[object]]:
    """[leg, prefill node, decode node, requests]: between which nodes requests are on their way."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for trace in running:
        leg = leg_of(trace)
        attempt = next((flight.attempts[-1] for flight in trace.flights if flight.attempts and not flight.end), None)
        if attempt is not None and leg != QUEUED:
            prefill_node = attempt.prefill_node if leg in (PREFILL, TRANSFER) else ""
            counts[leg, prefill_node, attempt.decode_node] += 1
    return [[*edge, number] for edge, number in counts.most_common(MAX_EDGES)]
