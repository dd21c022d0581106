"""The requests that ended last, and those of them that something went wrong with.

Owns two short lists and two counts. A request that its client is to blame for was refused; it is no failure of the
relay. It is an observer of the request log, so it costs once per request and nothing per token; without
anybody who looks at the page, that is all the page costs.
"""

from __future__ import annotations

from collections import deque

from baton.router.requests.trace import CANCELLED, FINISHED, RequestTrace

NUM_ENDED = 12
NUM_FAILURES = 8
_UNAUTHORIZED = 401
_HARMLESS = frozenset({"", FINISHED, CANCELLED})


class LastEnds:
    """The last requests that ended, and the last that something went wrong with; newest last."""

    def __init__(self) -> None:
        self.ended: deque[RequestTrace] = deque(maxlen=NUM_ENDED)
        self.failures: deque[RequestTrace] = deque(maxlen=NUM_FAILURES)
        """Also requests that were finished by a later attempt."""
        self.num_failed = 0
        self.num_refused = 0

    def note(self, trace: RequestTrace) -> None:
        """An observer: this request has ended. Those without a valid key are left out: anyone could fill the lists with
        them."""
        if trace.status == _UNAUTHORIZED:
            return
        self.ended.append(trace)
        if trace.is_refused:
            self.num_refused += 1
            return
        has_failed = trace.end not in _HARMLESS
        self.num_failed += has_failed
        if has_failed or any(len(flight.attempts) > 1 for flight in trace.flights):
            self.failures.append(trace)
