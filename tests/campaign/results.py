"""One line of JSON for each campaign, and the sum of many: `python -m tests.campaign.results FILE`.

Owns what is counted. A campaign that was cut short has no line, so it counts for nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeAlias

from tests.campaign.faults import Happened
from tests.campaign.gaps import GapJudge
from tests.campaign.load import WELL, Asked, Load
from tests.campaign.report import well_by_kind
from tests.campaign.settings import RESULTS, CampaignSettings
from tests.campaign.strangers import Strangers
from tests.system.harness import ROOT

Line: TypeAlias = dict[str, Any]
WRONG, HANG, LEAK, ERROR, GAP, BODY = "wrong", "hangs", "leaks", "errors", "gaps", "bodies"
UNTRIED, OTHER = "untried", "other"
"""Kinds of findings: an answer with a wrong, lost or doubled token or call; a request that stands still; something that
is left at the end, or grew; an error that nothing excuses; a gap that is too long; a random body that was answered with
5xx or not at all; KV tiers from which nothing was loaded; the rest, such as a program that ended by itself."""
_KINDS = (WRONG, HANG, LEAK, ERROR, GAP, BODY, UNTRIED, OTHER)
_COUNTS = ("faults", "requests", "streamed_tokens", "resumed", "told_again", "random_bodies", "minutes")
_COUNTERS = ("findings", "kinds", "ends", "right", "excused", "body_statuses")


def line_of(
    settings: CampaignSettings,
    load: Load,
    strangers: Strangers,
    happened: Sequence[Happened],
    excused: Mapping[str, int],
    judge: GapJudge,
) -> Line:
    """What a campaign came to, but for its findings."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "command": settings.command,
        "seed": settings.seed,
        "layout": f"{settings.num_prefill}P{settings.num_decode}D",
        "transport": settings.transport,
        "model": settings.model,
        "minutes": settings.minutes,
        "faults": len(happened),
        "kinds": Counter(each.fault.kind for each in happened),
        "requests": len(load.asked),
        "ends": Counter(asked.end for asked in load.asked),
        "right": well_by_kind(load.asked),
        "streamed_tokens": load.num_tokens,
        "resumed": sum(asked.end == WELL and asked.num_resumed > 0 for asked in load.asked),
        "told_again": sum(asked.num_told_again for asked in load.asked),
        "excused": dict(excused),
        "worst_gap_s": round(max(map(_worst_gap_s, load.asked), default=0.0), 2),
        "nearest_gap": round(max((gap.lasted_s / bound.seconds for gap, bound in judge.judged), default=0.0), 2),
        "random_bodies": strangers.statuses.total(),
        "body_statuses": {str(status): count for status, count in strangers.statuses.items()},
        "worst_body_s": round(strangers.worst_s, 1),
    }


def append(file: Path, line: Line, findings: Mapping[str, int]) -> str:
    """Write the line, with the findings by their kind, and return it."""
    text = json.dumps({**line, "findings": {kind: findings.get(kind, 0) for kind in _KINDS}})
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(f"{text}\n")
    return text


def summed(lines: Iterable[Line]) -> Line:
    """All campaigns together."""
    found = list(lines)
    total: Line = {"campaigns": len(found)}
    total |= {name: round(sum(line[name] for line in found), 1) for name in _COUNTS}
    total |= {name: max((line[name] for line in found), default=0) for name in ("worst_gap_s", "nearest_gap")}
    for name in ("layout", "transport", "model"):
        total[name] = Counter(line[name] for line in found)
    for name in _COUNTERS:
        counter: Counter[str] = Counter()
        for line in found:
            counter.update(line[name])
        total[name] = counter
    return total


def _worst_gap_s(asked: Asked) -> float:
    waits_s = chain.from_iterable(pairwise([asked.begun_s, *moments_s]) for moments_s in asked.moments_s)
    return max((after_s - before_s for before_s, after_s in waits_s), default=0.0)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    sys.stdout.write(json.dumps(summed(map(json.loads, file.read_text().splitlines())), indent=1) + "\n")
