"""What admission and access count, for `/metrics`. Labels are reasons of this code and names of the key file only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.http.access.guard import Guard
from baton.router.http.admission.admission import Admission


class AccessMetrics(Collector):
    """Requests that wait, those that were refused, and what each key has used. `guard` is None without keys."""

    def __init__(self, admission: Admission, guard: Guard | None) -> None:
        self._admission = admission
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        """Requests that wait and that were refused; with keys, what each has used."""
        guard = self._guard
        yield GaugeMetricFamily(
            "baton:num_requests_queued", "Requests that wait for their turn at the router", self._admission.num_waiting
        )
        rejected = CounterMetricFamily("baton:requests_rejected", "Requests refused", labels=["reason"])
        for reason, count in (self._admission.rejected + (Counter() if guard is None else guard.rejected)).items():
            rejected.add_metric([reason], count)
        yield rejected
        if guard is not None:
            yield from _of_keys(guard)


def _of_keys(guard: Guard) -> Iterable[Metric]:
    requests = CounterMetricFamily("baton:key_requests", "POST requests of a key", labels=["key"])
    prompt = CounterMetricFamily("baton:key_prompt_tokens", "Prompt tokens of a key", labels=["key"])
    generated = CounterMetricFamily("baton:key_generation_tokens", "Generated tokens of a key", labels=["key"])
    for identity in guard.identities:
        account = identity.account
        requests.add_metric([identity.name], account.num_requests)
        prompt.add_metric([identity.name], account.num_prompt_tokens)
        generated.add_metric([identity.name], account.num_generated_tokens)
    yield from (requests, prompt, generated)
