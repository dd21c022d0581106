"""Whether programs grow: their files, threads and memory, looked at every few seconds over each life.

A life that is long enough is judged by its own middle: the median of its last third may not be above that of its second
third by more than a little. The first third is left out, because tables and pools fill then.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass, field

import psutil

from tests.campaign.deployment import Deployment, Footprint

_LOOK_S = 2.0
MIN_LIFE_S = 240.0
"""A shorter life is not judged."""
_MORE_FILES, _MORE_THREADS, _MORE_BYTES = 8, 2, 16 * 2**20


@dataclass(slots=True)
class _Life:
    """What a process held at `moments_s`."""

    name: str
    moments_s: list[float] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)


class Growth:
    """See the module."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], _Life] = {}

    async def watch(self, deployment: Deployment) -> None:
        """Look at every program that is ready until cancelled."""
        while True:
            for name, pid in deployment.pids():
                with contextlib.suppress(psutil.Error):
                    self.add(name, pid, time.monotonic(), Footprint.of(pid))
            await asyncio.sleep(_LOOK_S)

    def add(self, name: str, pid: int, now_s: float, footprint: Footprint) -> None:
        """What the process `pid` of a program holds at `now_s`."""
        life = self._lives.setdefault((name, pid), _Life(name))
        life.moments_s.append(now_s)
        life.footprints.append(footprint)

    def judged(self) -> tuple[list[str], list[str]]:
        """(a line for each life that was long enough, those that grew too much)."""
        lines, grown = [], []
        for life in self._lives.values():
            if (lasted_s := life.moments_s[-1] - life.moments_s[0]) < MIN_LIFE_S:
                continue
            third = len(life.footprints) // 3
            before, after = (_medians(part) for part in (life.footprints[third : 2 * third], life.footprints[-third:]))
            files, threads, num_bytes = (now - then for now, then in zip(after, before, strict=True))
            held = f"{after[0]:g} files, {after[1]:g} threads, {after[2] / 2**20:.1f} MiB"
            more = f"{files:+g} files, {threads:+g} threads, {num_bytes / 2**20:+.2f} MiB"
            line = f"{life.name}, {lasted_s / 60:.1f} minutes: {held}; last third against the one before: {more}"
            lines.append(line)
            if files > _MORE_FILES or threads > _MORE_THREADS or num_bytes > _MORE_BYTES:
                grown.append(f"it grows: {line}")
        return lines, grown


def _medians(footprints: list[Footprint]) -> tuple[float, float, float]:
    return (
        statistics.median(each.num_files for each in footprints),
        statistics.median(each.num_threads for each in footprints),
        statistics.median(each.num_bytes for each in footprints),
    )
