"""Takes what a part of a soak has counted, twice a minute, and what it has left when it is over.

Reads the course of a campaign, and looks at processes and files of this machine; what it finds goes into `Part`.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import psutil

from tests.campaign.campaign import Course
from tests.campaign.growth import Life
from tests.soak.kept import Kept, LongGap, Part
from tests.system.harness import own_segments

_WRITE_S = 30.0
_SAMPLE_S = 60.0
_NUM_GAPS = 10
_SHM = Path("/dev/shm")


class PartWatch:
    """Keeps `part`, the last one of `kept`. Its time begins with the load."""

    def __init__(self, kept: Kept, part: Part) -> None:
        self._kept, self._part = kept, part
        self._course: Course | None = None
        self._begun_s = 0.0

    async def watch(self, course: Course) -> None:
        """Write until cancelled, and once more then. Threads do it, because this loop stamps the tokens."""
        self._course, self._begun_s = course, time.monotonic()
        try:
            while True:
                await asyncio.to_thread(self._write)
                await asyncio.sleep(_WRITE_S)
        finally:
            self._take()

    def _write(self) -> None:
        self._take()
        self._kept.write()

    def _take(self) -> None:
        course, part = self._course, self._part
        assert course is not None
        asked = list(course.load.asked)
        part.running_s = round(time.monotonic() - self._begun_s, 1)
        part.num_tokens = course.load.num_tokens
        part.faults = dict(Counter(each.fault.kind for each in list(course.happened)))
        part.requests = dict(Counter(each.end for each in asked if each.end))
        part.excused = dict(course.excused)
        part.findings = [finding.splitlines()[0] for finding in list(course.findings)]
        part.gaps = _longest(course)
        part.lone_gaps = list(course.judge.lines)
        part.samples = samples(course.growth.lives, self._begun_s)
        processes = dict(_descendants())
        part.processes = [[pid, begun_s] for pid, begun_s in processes.items()]
        part.segments = sorted({name for pid in processes for name in _segments(pid)})


def samples(lives: Iterable[Life], begun_s: float) -> dict[str, list[list[float]]]:
    """For each program the medians of each minute of its longest life."""
    of_program: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        of_program[life.name].append(life)
    return {
        name: _by_minute(max(own, key=lambda life: len(life.moments_s)), begun_s) for name, own in of_program.items()
    }


def _by_minute(life: Life, begun_s: float) -> list[list[float]]:
    looks = list(zip(list(life.moments_s), list(life.footprints), strict=False))
    rows = []
    for minute, group in groupby(looks, key=lambda look: max(0.0, look[0] - begun_s) // _SAMPLE_S):
        held = [footprint for _, footprint in group]
        rows.append(
            [
                minute * _SAMPLE_S,
                statistics.median(each.num_files for each in held),
                statistics.median(each.num_threads for each in held),
                statistics.median(each.num_bytes for each in held),
            ]
        )
    return rows


def left_behind(parts: Sequence[Part], relay: Path) -> dict[str, int]:
    """What is there of these parts, of which the last one has just ended: that of its processes none is left, it has
    seen itself. Journals of streams that broke stay for a minute."""
    processes = sum(_lives(int(pid), begun_s) for part in parts[:-1] for pid, begun_s in part.processes)
    segments = sum((_SHM / name).exists() for part in parts for name in part.segments)
    journals = sum(1 for path in (relay / "journals").glob("*.stream"))
    files = sum(1 for path in relay.rglob("*") if path.is_file()) - journals
    return {"processes": processes, "segments": segments, "journals": journals, "other files": files}


def _longest(course: Course) -> list[LongGap]:
    judged = sorted(course.judge.judged, key=lambda each: -each[0].lasted_s)[:_NUM_GAPS]
    return [LongGap(round(gap.lasted_s, 3), round(bound.seconds, 3), sorted(set(bound.kinds))) for gap, bound in judged]


def _descendants() -> Iterable[tuple[int, float]]:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield child.pid, child.create_time()


def _segments(pid: int) -> set[str]:
    try:
        return own_segments(pid)
    except OSError:
        return set()


def _lives(pid: int, begun_s: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - begun_s) < 1.0
    except psutil.Error:
        return False
