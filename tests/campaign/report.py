"""What a campaign tells: its timeline, its findings while it runs, and its result."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.campaign import checks
from tests.campaign.faults import Happened
from tests.campaign.load import CUT, FAILED, WELL, Asked

_SHOWN_LINES = 40


class Timeline:
    """Lines with the seconds since the campaign began, in a file and, the last of them, with each finding. `footprints`
    is the file beside it for what programs hold. `kinds` counts findings."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.findings: list[str] = []
        self.kinds: Counter[str] = Counter()
        self._begun_s = time.monotonic()
        self._file = (folder / "timeline.txt").open("w", buffering=1)
        self.footprints = (folder / "footprints.csv").open("w", buffering=1)
        self._lines: list[str] = []

    def note(self, text: str) -> None:
        """Add a line."""
        line = f"{time.monotonic() - self._begun_s:9.2f} {text}"
        self._lines.append(line)
        self._file.write(f"{line}\n")

    def found(self, text: str, kind: str = "other") -> None:
        """Something that must not happen, of one of the kinds that `results` counts."""
        self.note(f"FOUND {text}")
        self.kinds[kind] += 1
        recent = "\n".join(self._lines[-_SHOWN_LINES:])
        self.findings.append(f"{text}\n--- the timeline before\n{recent}")
        tell(f"FOUND after {time.monotonic() - self._begun_s:.1f} s: {text}")

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self.footprints.close()


def tell(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _told_of(thaws: Sequence[checks.Thaw]) -> list[str]:
    """How streams went on with a router that had been frozen."""
    alone = [thaw.late_s for thaw in thaws if not thaw.others]
    lines = [
        f"{len(thaws)} streams were open when a frozen router went on, {len(alone)} of them without any other fault; "
        f"of these the last one went on or ended after {max(alone, default=0.0):.2f} s"
    ]
    if others := [thaw for thaw in thaws if thaw.others]:
        lines.append(f"  latest after the router: {max(others, key=lambda thaw: thaw.late_s)}")
        lines.append(f"  latest after the last fault: {max(others, key=lambda thaw: thaw.held_s)}")
    return lines


def well_by_kind(asked: Sequence[Asked]) -> Counter[str]:
    """How many answers of each interface and kind of request were right to their end."""
    return Counter(f"{each.entry.request.api} {each.entry.request.kind}" for each in asked if each.end == WELL)


def summary(
    asked: Sequence[Asked],
    excused: Mapping[str, int],
    happened: Sequence[Happened],
    num_tokens: int,
) -> str:
    """The result as a page of text."""
    gaps = checks.gaps_by_kind(asked, happened)
    ends = Counter(each.end for each in asked)
    num_errors = sum(ends[end] for end in FAILED)
    resumed = [each for each in asked if each.end == WELL and each.num_resumed]
    num_broken_by_others = sum(each.mode != CUT for each in resumed)
    num_told_again = sum(each.num_told_again for each in asked)
    kinds = Counter(each.fault.kind for each in happened)
    lines = [
        f"{len(happened)} faults: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}",
        f"{len(asked)} requests, {num_tokens} streamed tokens: "
        + ", ".join(f"{count} {end}" for end, count in ends.most_common()),
        f"{num_errors} ended with an error or a broken connection, of them excused: "
        + (", ".join(f"{count} by {reason}" for reason, count in excused.items()) or "none"),
        f"{len(resumed)} streams were resumed by their client and are whole, of which others had broken "
        f"{num_broken_by_others}; {num_told_again} events were told again, and were the same",
        f"right answers: {', '.join(f'{count} {kind}' for kind, count in well_by_kind(asked).most_common())}",
        *_told_of(checks.after_thaws(asked, happened)),
        "",
        "| gaps above 0.4 s in streams, by kind of fault | number | p50 s | p99 s | max s |",
        "|---|---|---|---|---|",
    ]
    for kind in sorted(gaps):
        found = sorted(gaps[kind])
        p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
        lines.append(f"| {kind} | {len(found)} | {statistics.median(found):.2f} | {p99:.2f} | {found[-1]:.2f} |")
    return "\n".join(lines)
