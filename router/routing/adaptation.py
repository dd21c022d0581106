"""Adaptation: every few seconds the router looks at what goals were met, and lets a mixed node prefer another role.

Owns the clock of it, what is applied, logged and counted, and the decision for one model: how many mixed nodes prefer
to compute prompts, and how many to generate. When first tokens come too late while streams keep their pace, a node
that generates is to compute prompts, and the other way round; when both miss their goals there is too much to do, and
nothing that a change could mend.

Hysteresis: what is wrong has to be so in several windows in a row, more of them for a change that takes the last one
back. After a change some windows are not looked at, because requests of before end in them. One change at a time, and
of each kind one node is left.

Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router.nodes.registry import NodeRegistry
from baton.router.routing.goals import Attainment, Window
from baton.wire.messages.membership import DECODE, PREFILL

WINDOW_S = 15.0
MISSED, MET = 0.9, 0.93
"""Below the first share a goal is missed, from the second on it is met with something to spare."""
MIN_REQUESTS = 10
"""A window with fewer says nothing."""
_WINDOWS, _WINDOWS_BACK, _SETTLING = 2, 6, 2
_log = logging.getLogger(__name__)


class MixedNode(NamedTuple):
    """A node whose preference may change."""

    epoch: int
    preference: str
    load: int


@dataclass(frozen=True, slots=True)
class Change:
    """The node of that epoch is to prefer another role."""

    epoch: int
    preference: str
    reason: str


class RatioControl:
    """Decides for one model, from one window after another. Knows nodes by three numbers, and neither clocks nor
    messages."""

    def __init__(self) -> None:
        self._wanted = ""
        self._num_windows = 0
        self._num_settling = 0
        self._last = ""

    def decide(self, window: Window, nodes: Sequence[MixedNode]) -> Change | None:
        """The change to make at the end of a window, if any."""
        if self._num_settling:
            self._num_settling -= 1
            return None
        wanted = _wanted(window)
        self._num_windows = self._num_windows + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if not wanted or self._num_windows < (_WINDOWS_BACK if self._last not in ("", wanted) else _WINDOWS):
            return None
        others = [node for node in nodes if node.preference != wanted]
        if len(others) < 2:
            return None
        chosen = min(others, key=lambda node: node.load)
        self._last, self._num_settling, self._num_windows = wanted, _SETTLING, 0
        return Change(chosen.epoch, wanted, "late_first_tokens" if wanted == PREFILL else "slow_streams")


def _wanted(window: Window) -> str:
    """The role of which there is too little, "" when that is neither or both."""
    if window.num_first < MIN_REQUESTS or window.num_streams < MIN_REQUESTS:
        return ""
    in_time, kept_pace = window.num_in_time / window.num_first, window.num_kept_pace / window.num_streams
    if in_time < MISSED and kept_pace >= MET:
        return PREFILL
    return DECODE if kept_pace < MISSED and in_time >= MET else ""


class Adaptation(Collector):
    """Ends the windows, applies what is decided, and shows it as metrics. `attainments`: of each model. Without
    `adapts` it only counts and shows."""

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
        """The metrics of goals, preferences and predictions."""
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
