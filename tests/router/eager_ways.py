"""Ways that pull whatever can be pulled: a choice that does not hang on what the machine is said to take for anything.

Owns no costs: on a virtual clock nodes find none, and on a real one they are those of a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.router.nodes.registry import Node
from baton.router.routing.placement import Route
from baton.router.routing.prefix_ways import KnownPrompt, PrefixWays, holder_of
from baton.router.routing.pulls import PlannedPull, PullRecords


class EagerWays(PrefixWays):
    """Pulls whatever a node lacks and another one has, and waits `bound_s` for it."""

    def __init__(self, records: PullRecords, bound_s: float) -> None:
        super().__init__(records)
        self._bound_s = bound_s

    def choose(self, route: Route, prompt: KnownPrompt, nodes: Sequence[Node], now_s: float) -> Route:
        """See `PrefixWays`."""
        target = route.prefill or route.decode
        found = holder_of(prompt, target, nodes)
        if found is None:
            return route
        source, num_tokens, num_known = found
        return replace(route, pull=PlannedPull(source, target, num_tokens, num_known, 0.0, self._bound_s, 0.0))
