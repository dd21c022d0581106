"""Nodes that fail every request they are given get none for a while.

A node that is broken but answers looks idle, so a policy that goes by load would send it everything. Each request
avoids the nodes that have failed it (`router/requests/flight.py`); this module is about what many requests have seen. A
node that has failed `MAX_IN_A_ROW` attempts, none of which ended well in between, is ejected for `FIRST_S`. Then it is
given requests again. If the next one fails too, it is ejected for twice as long, at most `LAST_S`; if one ends well,
everything is forgotten.

Only what a node reports counts: a node that is lost is gone anyway, one without room has not failed, and the mistakes
of clients say nothing about it. When KV has not arrived, either end may be the reason, so it counts for both. Where all
decode nodes are ejected, all are used; where all prefill nodes are, decode nodes compute prompts. Lives on one event
loop; its times are of that loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from baton.router.nodes.registry import NodeRegistry

MAX_IN_A_ROW = 5
FIRST_S, LAST_S = 10.0, 160.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    """Of a node that has failed since it last did something well."""

    num_in_a_row: int = 0
    num_ejections: int = 0
    until_s: float = 0.0


class Ejections:
    """Which nodes are given no requests because they failed too many; `num_ejections` counts how often."""

    def __init__(self, registry: NodeRegistry) -> None:
        self.num_ejections = 0
        self._registry = registry
        self._records: dict[int, _Record] = {}

    def failed(self, epochs: Iterable[int], now_s: float) -> None:
        """These nodes have failed an attempt."""
        self._records = {epoch: each for epoch, each in self._records.items() if self._registry.get(epoch) is not None}
        for epoch in epochs:
            node = self._registry.get(epoch)
            if node is None or node.is_ejected:
                continue
            record = self._records.setdefault(epoch, _Record())
            record.num_in_a_row += 1
            if record.num_in_a_row >= MAX_IN_A_ROW:
                for_s = min(FIRST_S * 2**record.num_ejections, LAST_S)
                record.num_ejections += 1
                record.until_s = now_s + for_s
                self.num_ejections += 1
                self._registry.set_ejected(epoch, is_ejected=True)
                what = f"{record.num_in_a_row} attempts in a row failed there"
                _log.warning("%s node %s is given no request for %g s: %s", node.role, node.node_id, for_s, what)

    def succeeded(self, epoch: int | None) -> None:
        """An attempt ended well at this node; None: at none. What ends well while it is ejected had begun before."""
        node = None if epoch is None or not self._records else self._registry.get(epoch)
        if node is not None and not node.is_ejected:
            self._records.pop(node.epoch, None)

    def readmit(self, now_s: float) -> None:
        """Let nodes whose time is over be given requests again."""
        for epoch, record in self._records.items():
            node = self._registry.get(epoch)
            if node is not None and node.is_ejected and record.until_s <= now_s:
                self._registry.set_ejected(epoch, is_ejected=False)
                _log.info("%s node %s is given requests again", node.role, node.node_id)
