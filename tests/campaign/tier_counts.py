"""What the tiers of a campaign's nodes have stored, loaded and refused, over all lives of these nodes.

Counters end with the process that has them, so each node is looked at every few seconds. What it counted between the
last look and its death is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from typing import TypeAlias

from tests.campaign.deployment import Deployment, Member
from tests.system.harness import Metrics

_LOOK_S = 1.0
_TIERS = ("host", "disk", "valkey")
_METRICS = {
    **{end: ("kv_tier_blocks_total", {"end": end}) for end in ("stored", "loaded", "dropped")},
    **{reason: ("kv_tier_faults_total", {"reason": reason}) for reason in ("damaged", "failed", "silent")},
}
_Counts: TypeAlias = Counter[tuple[str, str]]


class TierCounts:
    """See the module."""

    def __init__(self) -> None:
        self._by_life: dict[tuple[str, int], _Counts] = defaultdict(Counter)

    async def watch(self, deployment: Deployment) -> None:
        """Look until cancelled."""
        while True:
            await self.look(deployment)
            await asyncio.sleep(_LOOK_S)

    async def look(self, deployment: Deployment) -> None:
        """Ask every node that is ready."""
        await asyncio.gather(*(self._look_at(member) for member in deployment.members if member.is_ready))

    def add(self, name: str, pid: int, metrics: Metrics) -> None:
        """What the process `pid` of a node has counted so far."""
        counts = self._by_life[name, pid]
        for tier in _TIERS:
            for column, (metric, labels) in _METRICS.items():
                with contextlib.suppress(KeyError):  # it has no such tier
                    counts[tier, column] = metrics.value(metric, tier=tier, **labels)

    def table(self) -> dict[str, dict[str, int]]:
        """By tier what all have counted."""
        total: _Counts = sum(self._by_life.values(), Counter())
        tiers = [tier for tier in _TIERS if any(total[tier, column] for column in _METRICS)]
        return {tier: {column: total[tier, column] for column in _METRICS} for tier in tiers}

    def summary(self) -> str:
        """The same as a table of text."""
        lines = [f"| blocks of tiers | {' | '.join(_METRICS)} |", "|---" * (len(_METRICS) + 1) + "|"]
        lines += [f"| {tier} | {' | '.join(map(str, counts.values()))} |" for tier, counts in self.table().items()]
        return "\n".join(lines)

    def findings(self) -> list[str]:
        """Faults of tiers have tried nothing where nothing was loaded."""
        is_used = any(counts["loaded"] for counts in self.table().values())
        return [] if is_used else ["no block was loaded from any tier"]

    async def _look_at(self, member: Member) -> None:
        node = member.running
        if node is not None:
            with contextlib.suppress(OSError):
                self.add(member.name, node.process.pid, await asyncio.to_thread(node.metrics))
