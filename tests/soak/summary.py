"""The sum of the parts of a soak, as text, and what grew over them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tests.campaign.growth import BYTES_PER_HOUR, FILES_PER_HOUR, THREADS_PER_HOUR
from tests.campaign.load import FAILED
from tests.soak.kept import GOAL_HOURS, Part
from tests.soak.slopes import Slope, pooled_slope

MIN_HOURS = 0.5
"""Slopes of a shorter soak are told and not judged."""
_COLUMNS = (("files", 1, FILES_PER_HOUR), ("threads", 1, THREADS_PER_HOUR), ("MiB", 2**20, BYTES_PER_HOUR))
_NUM_GAPS = 5
_MAX_NAMED = 3
_NUM_RISES = 3


def summary(parts: Sequence[Part]) -> list[str]:
    """A page of text."""
    codes = ", ".join(f"{code} ({count})" for code, count in Counter(part.code for part in parts).items())
    requests, excused = _total([part.requests for part in parts]), _total([part.excused for part in parts])
    faults = _total([part.faults for part in parts])
    num_errors, num_findings = sum(requests[end] for end in FAILED), sum(len(part.findings) for part in parts)
    return [
        f"{hours(parts):.2f} of {GOAL_HOURS:g} hours, in {len(parts)} parts, the longest of "
        f"{max((part.running_s for part in parts), default=0.0) / 60:.0f} minutes, "
        f"{sum(not part.has_ended for part in parts)} of them cut short; versions of the code (parts): {codes}",
        f"{faults.total()} faults: {_counted(faults)}",
        f"{requests.total()} requests, {sum(part.num_tokens for part in parts)} streamed tokens: {_counted(requests)}",
        f"{num_errors} errors, {excused.total()} of them excused ({_counted(excused)}); {num_findings} findings",
        "",
        "| program | last third of the last part | an hour more, between (with 95 % confidence) |",
        "|---|---|---|",
        *(_growth_line(name, parts) for name in _programs(parts)),
        "",
        *_gap_lines(parts),
        *_left_lines(parts),
    ]


def hours(parts: Sequence[Part]) -> float:
    """For how long all of them ran."""
    return sum(part.running_s for part in parts) / 3_600


def grown(parts: Sequence[Part]) -> list[str]:
    """What grows within the lives of programs for certain, or from part to part."""
    found = []
    for name in _programs(parts):
        for column, (unit, size, bound) in enumerate(_COLUMNS):
            slope = _slope(parts, name, column)
            if hours(parts) >= MIN_HOURS and slope is not None and slope.low > bound:
                found.append(f"{name} grows by {_told(slope, size)} {unit} an hour over {len(parts)} parts")
    for what in _total([part.left for part in parts]):
        counts = [part.left.get(what, 0) for part in parts if part.has_ended][-_NUM_RISES - 1 :]
        if len(counts) > _NUM_RISES and sorted(set(counts)) == counts:
            found.append(f"{what} are left by each part, and more each time: {counts}")
    return found


def _programs(parts: Sequence[Part]) -> list[str]:
    return sorted({name for part in parts for name in part.samples})


def _slope(parts: Sequence[Part], name: str, column: int) -> Slope | None:
    """Tables and pools fill in the first third of each part."""
    lives = [part.samples.get(name, []) for part in parts]
    return pooled_slope([[(row[0], row[column + 1]) for row in life[len(life) // 3 :]] for life in lives])


def _growth_line(name: str, parts: Sequence[Part]) -> str:
    last = [part.samples[name] for part in parts if part.samples.get(name)][-1]
    held, slopes = [], []
    for column, (unit, size, _) in enumerate(_COLUMNS):
        median = statistics.median(row[column + 1] for row in last[-len(last) // 3 :])
        held.append(f"{median / size:.{1 if size > 1 else 0}f} {unit}")
        slope = _slope(parts, name, column)
        slopes.append("not known" if slope is None else f"{_told(slope, size)} {unit}")
    return f"| {name} | {', '.join(held)} | {', '.join(slopes)} |"


def _told(slope: Slope, size: int) -> str:
    return f"{slope.hourly / size:+.2f} ({slope.low / size:+.2f} to {slope.high / size:+.2f})"


def _gap_lines(parts: Sequence[Part]) -> list[str]:
    gaps = sorted((gap for part in parts for gap in part.gaps), key=lambda gap: -gap.lasted_s)[:_NUM_GAPS]
    longest = (f"{gap.lasted_s:.2f} of {gap.allowed_s:.2f} s ({_named(gap.kinds)})" for gap in gaps)
    alone = [f"part {part.number}: {line}" for part in parts for line in part.lone_gaps]
    return [f"longest gaps: {'; '.join(longest) or 'none'}", *alone]


def _named(kinds: Sequence[str]) -> str:
    return f"{len(kinds)} kinds of faults" if len(kinds) > _MAX_NAMED else ", ".join(kinds) or "no fault"


def _left_lines(parts: Sequence[Part]) -> list[str]:
    names = _total([part.left for part in parts])
    return [f"left by each part, {name}: {[part.left.get(name, 0) for part in parts if part.left]}" for name in names]


def _total(counts: Sequence[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        for name, count in each.items():
            total[name] += count
    return total


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"
