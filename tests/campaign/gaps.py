"""For how long a stream may stand still, given what happened.

Owns the bounds: what each kind of fault may cost a stream. A gap is the time between two tokens of a choice, or from
the asking to its first one. After each fault there is a time in which streams may stand still:

- for as long as the fault lasts, or until somebody else goes on (`_STANDS_S`);
- then what it takes to go on (`_THEN_S`), in which everything that is open may be computed again;
- where several nodes were killed, the waits of requests that were lost with them (`_SUSPECTED_S`).

Faults of KV tiers give no time at all: what does not come from there is computed. But where there are some a node
waits `LATENCY_S` at any time, if it does not know yet, or does not ask, what computing takes (`eager_loads`).

While no decode node is there, and 2 s longer, all may stand still. A gap may have as much of all these times as fall
into it, together. Beside that it may have what is normal (`NORMAL_S`, and for as long as the same stream stands still
undisturbed) and everything that is open computed once. All but the waits are stretched as the machine was (`pace`); or,
where that is more, what threads on the way of the gap's own token waited for a processor is added (`tests.stations`).
So a gap with one lost node in it has the bound of the plan: 2 s and recomputation.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from baton.wire.links import HANDSHAKE_TIMEOUT_MS
from tests.campaign.deployment import Deployment, Outage
from tests.campaign.faults import Happened
from tests.campaign.load import Asked
from tests.campaign.pace import Pace
from tests.stations.account import account_of
from tests.stations.ring import Ring, Station, request_key
from tests.stations.stamps import CLIENT, Stamps, stalls

NORMAL_S = 0.5
LOST_S = 2.0
AGENT_S = 2.5
"""A NIXL agent that died is replaced within this time on an idle machine."""
_SILENT_S = 3.5
"""A silent node is lost after 3 s, which is looked at twice a second."""
_MOVED_S = 0.1
_THAWED_S = 5.0
_SUSPECTED_S = 7.0
"""A request that was lost with two nodes waits up to 5 s for them, and its next attempts for up to 2 s."""
_TOGETHER_S = 10.0
_BEFORE_S = 1.0
"""Stamps are read from so long before the asking on."""
_STANDS_S = {
    "kill": 0.0,
    "kill-together": 0.0,
    "restart": 0.0,
    "drain": 0.0,
    "freeze": _SILENT_S,
    "kill-rank": 0.0,
    "descriptors": 0.0,
    "disk-full": 0.0,
    "memory": 0.0,
    "threads": 0.0,
    "shm-full": 0.0,
}
"""What is not here may keep a stream for as long as it lasts: slow nodes and links, and faults of the router."""
_THEN_S = {
    "restart": _MOVED_S,
    "drain": _MOVED_S,
    "disk-full": 0.0,
    "router-freeze": _THAWED_S,
    "router-kill": _THAWED_S,
    "router-memory": _THAWED_S,
    "poison": 4 * LOST_S,
    "freeze-rank": 12.0,
    "flip": LOST_S + HANDSHAKE_TIMEOUT_MS / 1000,
}
"""Of all others `LOST_S`. The last lie of a link may be in the length of a handshake's frame, which is waited for."""
_KILLS = {"kill", "kill-together", "memory", "shm-full", "poison", "kill-rank", "freeze-rank"}
_KILLS_SEVERAL = {"kill-together", "poison"}


@dataclass(frozen=True, slots=True)
class Gap:
    """A choice of `asked` made no progress between these moments; the first had so many tokens, the second so many."""

    asked: Asked
    begun_s: float
    ended_s: float
    choice: int = 0
    num_before: int = 0
    num_after: int = 0

    @property
    def lasted_s(self) -> float:
        """Its length."""
        return self.ended_s - self.begun_s


@dataclass(frozen=True, slots=True)
class Bound:
    """How long a gap may be, why, and the kinds of the faults that touch it."""

    seconds: float
    why: str
    kinds: tuple[str, ...]
    stretch: float


def gaps_of(asked: Asked) -> Iterator[Gap]:
    """All gaps of a request."""
    for choice, (moments_s, totals) in enumerate(zip(asked.moments_s, asked.totals, strict=True)):
        events = pairwise(zip([asked.begun_s, *moments_s], [0, *totals], strict=True))
        for (before_s, num_before), (after_s, num_after) in events:
            yield Gap(asked, before_s, after_s, choice, num_before, num_after)


class GapJudge:
    """Judges the gaps of requests when they have ended. `token_s`: what a token of a prompt takes, with nothing else to
    do. `folder`: with the stamps of all programs. `turns` are those of the loop that
    stamps tokens. `lines` tell of each gap that no fault touched to which station it belongs."""

    def __init__(
        self,
        happened: Sequence[Happened],
        deployment: Deployment,
        token_s: float,
        folder: Path,
        normal_s: float = NORMAL_S,
    ) -> None:
        self.pace = Pace()
        self.turns = Ring(folder / f"{CLIENT}.stamps")
        self.judged: list[tuple[Gap, Bound]] = []
        self.lines: list[str] = []
        self._happened, self._deployment = happened, deployment
        self._token_s, self._folder, self._normal_s = token_s, folder, normal_s

    def findings_of(self, asked: Asked, others: Sequence[Asked]) -> list[str]:
        """What lasted longer than it may. `others`: all requests."""
        there = self._deployment
        known = Known(
            self._happened,
            there.outages,
            there.scarcities,
            others,
            self.pace,
            self._token_s,
            normal_s=self._normal_s,
        )
        found = []
        for gap in gaps_of(asked):
            if gap.lasted_s > self._normal_s + asked.entry.silent_s:
                bound, why = known.bound_of(gap), ""
                if gap.lasted_s > bound.seconds or not bound.kinds:
                    bound, why = self._accounted(known, gap, bound)
                self.judged.append((gap, bound))
                if gap.lasted_s > bound.seconds:
                    ago_s = time.monotonic() - gap.ended_s
                    took = f"a gap of {gap.lasted_s:.2f} s, which ended {ago_s:.1f} s ago"
                    found.append(f"{took}, where {bound.seconds:.2f} s are allowed ({bound.why}){why}: {asked}")
        return found

    def _accounted(self, known: Known, gap: Gap, bound: Bound) -> tuple[Bound, str]:
        """The bound, which is no less than what it is on an idle machine and what the gap's own token waited for
        processors; and the account."""
        request, before, after = request_key(gap.asked.request_id), gap.num_before - 1, gap.num_after - 1
        self.turns.add(Station.TURN)  # what the loop has waited before this turn is in no stamp yet
        stamps = Stamps(self._folder, gap.asked.begun_s - _BEFORE_S)
        if not gap.num_after:  # told without ids: what the router had written when the client got it
            before, after = (
                stamps.last_written(request, gap.choice, moment_s) for moment_s in (gap.begun_s, gap.ended_s)
            )
        account = account_of(stamps, request, gap.choice, (before, gap.begun_s), (after, gap.ended_s))
        if account is None:
            return bound, "; stations do not know it"
        idle_s = replace(known, pace=Pace()).bound_of(gap).seconds
        stood = stalls(self._folder, gap.begun_s, gap.ended_s)[-1:]
        why = "".join([f"; {account}", *(f"; the router's loop stood: {line}" for line in stood)])
        if not bound.kinds:
            self.lines.append(f"no fault touched a gap of {gap.lasted_s:.2f} s{why}")
        return replace(bound, seconds=max(bound.seconds, idle_s + account.waited_s)), why

    def summary(self) -> list[str]:
        """A table of what was judged, by the faults that touched it."""
        lines = [
            f"| gaps above {NORMAL_S:g} s, by faults that touch them | number | longest s | nearest to its bound |"
        ]
        lines.append("|---|---|---|---|")
        groups: dict[str, list[tuple[Gap, Bound]]] = defaultdict(list)
        for gap, bound in self.judged:
            name = bound.kinds[0] if len(bound.kinds) == 1 else "several" if bound.kinds else "none"
            groups[name].append((gap, bound))
        for name, judged in sorted(groups.items()):
            gap, bound = max(judged, key=lambda each: each[0].lasted_s / each[1].seconds)
            longest_s = max(gap.lasted_s for gap, _ in judged)
            lines.append(
                f"| {name} | {len(judged)} | {longest_s:.2f} | {gap.lasted_s:.2f} of {bound.seconds:.2f} s, work "
                f"{bound.stretch:.2f} times as long |"
            )
        return lines


@dataclass(frozen=True, slots=True)
class Known:
    """What bounds follow from. `scarcities`: times with one decode node at most, when nobody goes on for it."""

    happened: Sequence[Happened]
    outages: Sequence[Outage]
    scarcities: Sequence[Outage]
    asked: Sequence[Asked]
    pace: Pace
    token_s: float
    agent_s: float = AGENT_S
    normal_s: float = NORMAL_S

    def bound_of(self, gap: Gap) -> Bound:
        """The bound of a gap."""
        stretch = self.pace.stretch(gap.begun_s, gap.ended_s)
        again_s = self.token_s * self._num_tokens(gap)
        normal_s = self.normal_s + gap.asked.entry.silent_s
        kinds, why = [], [f"{normal_s:.2f} s are normal, what was open takes {again_s:.2f} s"]
        times = [
            (out.begun_s, (out.ended_s or gap.ended_s) + stretch * (LOST_S + again_s))
            for out in self.outages
            if _overlap_s(gap, out.begun_s, out.ended_s)
        ]
        for each in [each for each in self.happened if not each.fault.is_of_tiers]:
            until_s = each.begun_s + self._stands_s(each, gap) + stretch * _then_s(each, again_s, self.agent_s)
            if self._is_suspected(each):
                until_s += _SUSPECTED_S
            if each.begun_s < gap.ended_s and until_s > gap.begun_s:
                times.append((each.begun_s, until_s))
                kinds.append(each.fault.kind)
                why.append(f"until {until_s - gap.begun_s:.2f} s for {each.fault}")
        late_s, hit_s = self.pace.lag_s(gap.begun_s, gap.ended_s), _covered_s(gap, times)
        why.append(f"{hit_s:.2f} s in all; work took {stretch:.2f} times as long as on an idle machine")
        return Bound(hit_s + late_s + stretch * (normal_s + again_s), "; ".join(why), tuple(kinds), stretch)

    def _stands_s(self, each: Happened, gap: Gap) -> float:
        lasts_s = (gap.ended_s if each.ended_s is None else each.ended_s) - each.begun_s
        cap_s = _STANDS_S.get(each.fault.kind, math.inf)
        if cap_s and any(_overlap_s(gap, scarce.begun_s, scarce.ended_s) for scarce in self.scarcities):
            cap_s = math.inf
        return max(0.0, min(cap_s, lasts_s))

    def _is_suspected(self, each: Happened) -> bool:
        """Whether requests may have been lost with this node and another one."""
        if each.fault.kind not in _KILLS:
            return False
        before_s = (other.begun_s for other in self.happened if other is not each and other.fault.kind in _KILLS)
        return each.fault.kind in _KILLS_SEVERAL or any(0 <= each.begun_s - s <= _TOGETHER_S for s in before_s)

    def _num_tokens(self, gap: Gap) -> int:
        """Of everything that was open in it, all choices."""
        return sum(
            each.entry.usage[0] * len(each.entry.choices) + each.entry.num_tokens
            for each in self.asked
            if each.begun_s < gap.ended_s and (each.ended_s is None or each.ended_s > gap.begun_s)
        )


def _then_s(each: Happened, again_s: float, agent_s: float) -> float:
    """How much work it takes to go on behind a fault."""
    then_s = LOST_S + agent_s if each.fault.kind == "kill-agent" else _THEN_S.get(each.fault.kind, LOST_S)
    return then_s + again_s if then_s >= LOST_S else then_s


def _covered_s(gap: Gap, times: Sequence[tuple[float, float]]) -> float:
    """How much of a gap lies in any of these times."""
    covered_s, reached_s = 0.0, gap.begun_s
    for begun_s, ended_s in sorted(times):
        begun_s, ended_s = max(begun_s, reached_s), min(ended_s, gap.ended_s)
        if ended_s > begun_s:
            covered_s, reached_s = covered_s + ended_s - begun_s, ended_s
    return covered_s


def _overlap_s(gap: Gap, begun_s: float, ended_s: float | None) -> float:
    until_s = gap.ended_s if ended_s is None else min(gap.ended_s, ended_s)
    return max(0.0, until_s - max(gap.begun_s, begun_s))
