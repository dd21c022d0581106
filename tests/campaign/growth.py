"""Whether programs grow: their files, threads and memory, looked at every few seconds over each life.

A life that is long enough is judged by its own later two thirds, because tables and pools fill in the first: the
median of its last third may not be above that of its second by more than a little. A life that is longer still is
judged by its slope too, which finds what grows too slowly for that: the median of the slopes between the means of ten
equal parts (Theil and Sen), so that what was held for a moment counts for nothing. Each look is a line of
`footprints.csv`.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import combinations
from typing import TextIO

import psutil

from tests.campaign.deployment import Deployment, Footprint

_LOOK_S = 2.0
MIN_LIFE_S = 240.0
"""A shorter life is not judged."""
MIN_SLOPE_LIFE_S = 1_800.0
"""The slope of a shorter life is told and not judged."""
_MORE_FILES, _MORE_THREADS, _MORE_BYTES = 8, 2, 16 * 2**20
FILES_PER_HOUR, THREADS_PER_HOUR, BYTES_PER_HOUR = 4.0, 1.0, 8.0 * 2**20
_NOISE = (8.0, 1.0, 4.0 * 2**20)
"""By no more than this does a slope matter: connections and tasks of one moment are no growth. To each other node of
which there are two, four files are open or not."""
_PARTS = 10


@dataclass(slots=True)
class Life:
    """What a process held at `moments_s`."""

    name: str
    moments_s: list[float] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)


class Growth:
    """See the module. `file` gets a line for each look."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._lives: dict[tuple[str, int], Life] = {}
        self._file = file

    @property
    def lives(self) -> Sequence[Life]:
        """All lives so far, in the order in which they began."""
        return list(self._lives.values())

    async def watch(self, deployment: Deployment) -> None:
        """Look at every program that is ready until cancelled."""
        while True:
            for name, pid in deployment.pids():
                with contextlib.suppress(psutil.Error):
                    self.add(name, pid, time.monotonic(), Footprint.of(pid))
            await asyncio.sleep(_LOOK_S)

    def add(self, name: str, pid: int, now_s: float, footprint: Footprint) -> None:
        """What the process `pid` of a program holds at `now_s`."""
        life = self._lives.setdefault((name, pid), Life(name))
        life.moments_s.append(now_s)
        life.footprints.append(footprint)
        if self._file is not None:
            self._file.write(f"{name},{pid},{now_s:.1f},{','.join(map(str, astuple(footprint)))}\n")

    def judged(self) -> tuple[list[str], list[str]]:
        """(a line for each life that was long enough, those that grew too much)."""
        lines, grown = [], []
        for life in self._lives.values():
            if (lasted_s := life.moments_s[-1] - life.moments_s[0]) < MIN_LIFE_S:
                continue
            third = len(life.footprints) // 3
            before, after = (_medians(part) for part in (life.footprints[third : 2 * third], life.footprints[-third:]))
            files, threads, num_bytes = (now - then for now, then in zip(after, before, strict=True))
            slopes = _slopes_per_hour(life.moments_s[third:], life.footprints[third:])
            held = f"{after[0]:g} files, {after[1]:g} threads, {after[2] / 2**20:.1f} MiB"
            more = f"{files:+g} files, {threads:+g} threads, {num_bytes / 2**20:+.2f} MiB"
            hourly = f"{slopes[0]:+.2f} files, {slopes[1]:+.2f} threads, {slopes[2] / 2**20:+.2f} MiB"
            line = f"{life.name}, {lasted_s / 60:.1f} minutes: {held}; last third against the one before: {more}"
            line += f"; an hour: {hourly}"
            lines.append(line)
            is_more = files > _MORE_FILES or threads > _MORE_THREADS or num_bytes > _MORE_BYTES
            if is_more or (lasted_s >= MIN_SLOPE_LIFE_S and _is_steep(slopes, lasted_s * 2 / 3)):
                grown.append(f"it grows: {line}")
        return lines, grown


def _slopes_per_hour(moments_s: Sequence[float], footprints: Sequence[Footprint]) -> tuple[float, float, float]:
    """(files, threads, bytes) that come in an hour."""
    size = len(moments_s) // _PARTS
    parts = [slice(number * size, (number + 1) * size) for number in range(_PARTS)]
    times_s = [statistics.mean(moments_s[part]) for part in parts]
    held = [astuple(each) for each in footprints]
    columns = [[statistics.mean(row[column] for row in held[part]) for part in parts] for column in range(3)]
    files, threads, num_bytes = (
        3_600
        * statistics.median(
            (values[late] - values[early]) / (times_s[late] - times_s[early])
            for early, late in combinations(range(_PARTS), 2)
        )
        for values in columns
    )
    return files, threads, num_bytes


def _is_steep(slopes: tuple[float, float, float], over_s: float) -> bool:
    bounds = zip(slopes, (FILES_PER_HOUR, THREADS_PER_HOUR, BYTES_PER_HOUR), _NOISE, strict=True)
    return any(slope > bound and slope * over_s / 3_600 > noise for slope, bound, noise in bounds)


def _medians(footprints: list[Footprint]) -> tuple[float, float, float]:
    return (
        statistics.median(each.num_files for each in footprints),
        statistics.median(each.num_threads for each in footprints),
        statistics.median(each.num_bytes for each in footprints),
    )
