"""Counts of drafts as metrics of Prometheus. A node shows its own, and a router those of its nodes by the same names.

Owns the names. They are those of vLLM with `baton:` before them, but for the label `method`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from baton.wire.drafts import DraftsOfMethod

METHOD_LABEL, POSITION_LABEL = "method", "position"


def draft_metrics(
    labels: Sequence[str], counted: Iterable[tuple[Sequence[str], Iterable[DraftsOfMethod]]]
) -> Iterable[Metric]:
    """`counted`: values of `labels`, and what was verified there. Positions are counted from 0."""
    of_method = [*labels, METHOD_LABEL]
    of_position = [*of_method, POSITION_LABEL]
    doc = "Drafts that were verified"
    drafts = CounterMetricFamily("baton:spec_decode_num_drafts", doc, labels=of_method)
    doc = "Tokens of drafts that were verified"
    tokens = CounterMetricFamily("baton:spec_decode_num_draft_tokens", doc, labels=of_method)
    doc = "Tokens of drafts that were right"
    accepted = CounterMetricFamily("baton:spec_decode_num_accepted_tokens", doc, labels=of_method)
    doc = "The same by the place in the draft"
    tokens_there = CounterMetricFamily("baton:spec_decode_num_draft_tokens_per_pos", doc, labels=of_position)
    accepted_there = CounterMetricFamily("baton:spec_decode_num_accepted_tokens_per_pos", doc, labels=of_position)
    for values, methods in counted:
        for each in methods:
            place = [*values, each.method]
            drafts.add_metric(place, each.num_drafts)
            tokens.add_metric(place, sum(each.tokens_by_position))
            accepted.add_metric(place, sum(each.accepted_by_position))
            _add_positions(tokens_there, place, each.tokens_by_position)
            _add_positions(accepted_there, place, each.accepted_by_position)
    return (drafts, tokens, accepted, tokens_there, accepted_there)


def _add_positions(family: CounterMetricFamily, place: Sequence[str], counts: Sequence[int]) -> None:
    for position, count in enumerate(counts):
        family.add_metric([*place, str(position)], count)
