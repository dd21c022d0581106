"""Adaptation: every few seconds the router looks at what goals were met, and lets a mixed node prefer another role.

Owns the clock of it, and what is applied, logged and counted; `baton.router.routing.ratio_control` decides. Lives on
one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.attainment import Attainment
from baton.router.routing.ratio_control import MixedNode, RatioControl, Window
from baton.wire.messages import DECODE, PREFILL

WINDOW_S = 15.0
_log = logging.getLogger(__name__)


class Adaptation(Collector):
    """See the module. `attainments`: of each model. Without `adapts` it only counts and shows."""

    def __init__(self, registry: NodeRegistry, attainments: Mapping[str, Attainment], *, adapts: bool) -> None:
        self._registry = registry
        self._attainments = attainments
        self._controls = {model: RatioControl() for model in attainments} if adapts else {}
        self._seen = {model: each.total for model, each in attainments.items()}
        self._changes: Counter[tuple[str, str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin with the first window. Must be called on the event loop."""
        if self._controls:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._window_over)

    def stop(self) -> None:
        """Change nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def num_changes(self) -> int:
        """How often a node was let prefer another role."""
        return self._changes.total()

    def end_window(self) -> None:
        """Decide for each model, and apply it."""
        for model, control in self._controls.items():
            total, before = self._attainments[model].total, self._seen[model]
            window = Window(*(now - then for now, then in zip(total, before, strict=True)))
            self._seen[model] = total
            nodes = {node.epoch: node for node in self._registry.able(PREFILL, model) if node.hello.prefers}
            mixed = [
                MixedNode(epoch, DECODE if node.prefers(DECODE) else PREFILL, node.load)
                for epoch, node in nodes.items()
            ]
            change = control.decide(window, mixed)
            if change is not None:
                self._registry.prefer(change.epoch, change.preference)
                self._changes[model, change.preference, change.reason] += 1
                shares = (window.num_in_time, window.num_first, window.num_kept_pace, window.num_streams)
                text = "node %s prefers %s from now on: %s; %d of %d first tokens in time, %d of %d streams in pace"
                _log.info(text, nodes[change.epoch].node_id, change.preference, change.reason, *shares)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        goals = CounterMetricFamily(
            "baton:goal_requests", "Requests by goal and whether it was met", labels=["model_name", "goal", "met"]
        )
        refused = CounterMetricFamily(
            "baton:refused_late", "Requests refused since a goal would be missed", labels=["model_name", "goal"]
        )
        changes = CounterMetricFamily(
            "baton:preference_changes", "Changes of what a mixed node prefers", labels=["model_name", "to", "reason"]
        )
        for model, each in self._attainments.items():
            for goal, total, met in (
                ("ttft", each.num_first, each.num_in_time),
                ("tpot", each.num_streams, each.num_kept_pace),
            ):
                goals.add_metric([model, goal, "yes"], met)
                goals.add_metric([model, goal, "no"], total - met)
            refused.add_metric([model, "ttft"], each.num_late_refused)
            refused.add_metric([model, "tpot"], each.num_slow_refused)
        for labels, number in self._changes.items():
            changes.add_metric(labels, number)
        preferences = GaugeMetricFamily(
            "baton:node_prefers", "1 for each role that a mixed node prefers", labels=["node", "role"]
        )
        factors = GaugeMetricFamily(
            "baton:node_ttft_factor", "What a predicted time to a first token is multiplied by", labels=["node"]
        )
        for node in self._registry.all():
            factors.add_metric([node.node_id], node.prompts.factor)
            for role in (PREFILL, DECODE) if node.hello.prefers else ():
                preferences.add_metric([node.node_id, role], node.prefers(role))
        yield from (goals, refused, changes, preferences, factors)

    def _window_over(self) -> None:
        self.start()
        self.end_window()
