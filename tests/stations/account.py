"""To which part of a token's way a gap between two events of a client belongs.

A gap is the time in which the node made the next token, and by how much longer each hop took for it than for the one
before. What a hop took longer while the threads that have to do it waited for a processor, is the machine's; the rest
is the product's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tests.stations.stamps import CLIENT, ROUTER, Passed, Stamps

_TOLD_S = 0.02


@dataclass(frozen=True, slots=True)
class Hop:
    """A part of the way: by how much it made the gap longer, and for how much of that its threads waited for a
    processor or ran."""

    name: str
    grown_s: float
    waited_s: float
    ran_s: float

    def __str__(self) -> str:
        return f"{self.grown_s:.2f} s {self.name} (waited for a processor {self.waited_s:.2f}, ran {self.ran_s:.2f})"


@dataclass(frozen=True, slots=True)
class Account:
    """All hops of one gap."""

    hops: tuple[Hop, ...]

    @property
    def waited_s(self) -> float:
        """For how much of the gap threads on the way waited for a processor."""
        return sum(hop.waited_s for hop in self.hops)

    @property
    def longest(self) -> Hop:
        """The hop that it belongs to above all."""
        return max(self.hops, key=lambda hop: hop.grown_s)

    def __str__(self) -> str:
        told = sorted((hop for hop in self.hops if hop.grown_s >= _TOLD_S), key=lambda hop: -hop.grown_s)
        return ", ".join(map(str, told)) or "no hop took longer"


def account_of(
    stamps: Stamps, request: int, choice: int, before: tuple[int, float], after: tuple[int, float]
) -> Account | None:
    """Of the gap between two events of a choice, each given by the output index of its last token and by when it came.
    The one before is (-1, the moment of asking) for the first. None when stations do not know both tokens."""
    last = stamps.passed(request, choice, after[0])
    first = _asked(before[1]) if before[0] < 0 else stamps.passed(request, choice, before[0])
    if first is None or last is None:
        return None
    ways = [(*_moments(passed), came_s) for passed, came_s in ((first, before[1]), (last, after[1]))]
    took = [[later - earlier for earlier, later in pairwise(way)] for way in ways]
    names = ("from the node to the router", "in the router's inbox", "in writing", "from the router to the client")
    hops = [
        _hop(stamps, "in making", last.emitted_s - first.emitted_s, {last.node: False}, first.emitted_s, ways[1][0])
    ]
    threads = ({ROUTER: True, last.node: True, CLIENT: False}, {ROUTER: False}, {ROUTER: False}, {CLIENT: False})
    for number, name in enumerate(names):
        grown_s = took[1][number] - took[0][number]
        hops.append(_hop(stamps, name, grown_s, threads[number], ways[1][number], ways[1][number + 1]))
    return Account(tuple(hops))


def _hop(stamps: Stamps, name: str, grown_s: float, threads: dict[str, bool], begun_s: float, ended_s: float) -> Hop:
    """`threads`: the programs that have to do it, first the one whose running is told, and whether its links' threads
    are among those that do."""
    waited_s, ran_s = 0.0, None
    for program, has_links in threads.items():
        own_s, links_s, of_this_s = stamps.waited_s(program, begun_s, ended_s)
        waited_s += own_s + has_links * links_s
        ran_s = of_this_s if ran_s is None else ran_s
    grown_s = max(0.0, grown_s)
    return Hop(name, grown_s, min(grown_s, waited_s), ran_s or 0.0)


def _asked(moment_s: float) -> Passed:
    return Passed("", moment_s, moment_s, moment_s, moment_s)


def _moments(passed: Passed) -> tuple[float, float, float, float]:
    return passed.emitted_s, passed.received_s, passed.taken_s, passed.written_s
