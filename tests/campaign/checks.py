"""What must be true of a campaign: which errors may come, progress, gaps, and quiescence at the end.

Judges; makes nothing happen. Errors are excused by faults of the router, and by `NODE_WAIT_S` without any decode
node; the schedule always leaves one alone unless all are to be killed. A request may be taken for poison where so many
nodes were killed while it ran, or were frozen and cut off from the router, which cannot tell the two apart, or were
still cut off when it ended. That a stream which broke cannot be resumed is excused by a router that could not write
its journal, and by nothing else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Protocol

import psutil

from baton.router.routing.suspicion import MAX_SUSPICIOUS
from tests.campaign.deployment import NODE_WAIT_S, Deployment, Footprint, Outage, tail
from tests.campaign.faults import Happened
from tests.campaign.load import FAILED, FORGOTTEN, HUNG, WHOLE, WRONG, Asked
from tests.campaign.strangers import Answered
from tests.system.harness import Program

ROUTER_SILENT_S = 8.0
"""A router that is frozen for longer loses its nodes, which drop what it asked for."""
_AFTER_ROUTER_S = 3.0
"""So long after a fault of the router, connections of before may still break."""
_POISONOUS = "nodes were lost again and again"
_CUTS = ("cut", "hole", "hole-one-way")
_WITHOUT = "the server has no memory, thread or file left"
_FAULTY = 500
"""Nothing excuses this status."""
_NOTICED_S = 1.0
"""The death of a node is noticed later than a node that is started again."""
_AFTER_FAULT_S = 6.0
AFTER_THAW_S = 5.0
"""So soon after a frozen router went on, or after the last other fault meanwhile, every stream goes on or ends."""
_LONG_GAP_S = 4.0
GAP_S = 0.4
"""A shorter time between two tokens is no gap: steps of a busy machine take as long."""
_QUIET_S, _LOOK_S = 90.0, 0.5
_MORE_FILES, _MORE_THREADS, _MORE_BYTES = 8, 12, 96 * 2**20
"""Threads: pools fill as they are used, above all a router's: six of its event loop, two for grammars, one each for
large bodies, for very long prompts and for journals. Files: for each other node, because at first not every two are
connected."""


class Ended(Protocol):
    """What has ended, or runs. `end`: how, in the words of `load`; `message`: what was said then."""

    begun_s: float
    ended_s: float | None
    end: str
    message: str


def excuse(
    asked: Ended, happened: Sequence[Happened], outages: Iterable[Outage] = (), deaths_s: Iterable[float] = ()
) -> str:
    """Why a request may have ended with an error; "" if it may not. `deaths_s`: when nodes were killed."""
    ended_s = asked.ended_s or time.monotonic()
    if asked.end == FORGOTTEN:
        return _without_journal(asked, happened)
    for outage in outages:
        lasted_s = min(outage.ended_s or ended_s, ended_s) - max(outage.begun_s, asked.begun_s)
        if lasted_s > NODE_WAIT_S - 2 * _LOOK_S:
            return f"no decode node (for {lasted_s:.0f} s)"
    if _POISONOUS in asked.message:
        num_deaths = sum(asked.begun_s - _NOTICED_S <= death_s <= ended_s for death_s in deaths_s)
        num_lost = num_deaths + _num_cut_off(happened, asked.begun_s - _NOTICED_S, ended_s)
        if num_lost >= MAX_SUSPICIOUS:
            return f"taken for poison ({num_lost} nodes were killed or cut off meanwhile)"
    for each in happened:
        until_s = (each.ended_s or ended_s) + _AFTER_ROUTER_S
        if each.begun_s <= ended_s and until_s >= asked.begun_s:
            if each.fault.kind == "router-kill":
                return f"router killed (#{each.fault.number})"
            if each.fault.kind == "router-memory":
                return f"router without memory (#{each.fault.number})"
            if each.fault.kind == "router-threads" and _WITHOUT in asked.message:
                return f"router without threads (#{each.fault.number})"
            if each.fault.kind == "router-freeze" and each.fault.lasts_s > ROUTER_SILENT_S:
                return f"router frozen (for {each.fault.lasts_s:.1f} s, #{each.fault.number})"
    return ""


def _num_cut_off(happened: Sequence[Happened], begun_s: float, ended_s: float) -> int:
    """Nodes whose control connection was cut while they stood still, between two moments, or could not hold at the
    end."""
    frozen = [each for each in happened if each.fault.kind == "freeze"]
    links = [each for each in happened if each.fault.link == "control" and each.fault.kind in (*_CUTS, "flip")]
    found = {each.fault.target for each in links if each.begun_s <= ended_s <= (each.ended_s or ended_s)}
    for one, cut in product(frozen, links):
        until_s = min(ended_s, one.ended_s or ended_s, cut.ended_s or ended_s)
        if one.fault.target == cut.fault.target and max(begun_s, one.begun_s, cut.begun_s) <= until_s:
            found.add(one.fault.target)
    return len(found)


def _without_journal(asked: Ended, happened: Sequence[Happened]) -> str:
    for each in happened:
        ended_s = each.ended_s or time.monotonic()
        if each.fault.kind in ("router-disk-full", "router-memory") and ended_s > asked.begun_s:
            return f"no room for its journal (#{each.fault.number})"
    return ""


def finding_of(
    asked: Asked, happened: Sequence[Happened], outages: Iterable[Outage] = (), deaths_s: Iterable[float] = ()
) -> str:
    """What is wrong with how a request ended; "" if nothing is."""
    if asked.end in (WRONG, HUNG):
        return str(asked)
    if asked.end in FAILED and not excuse(asked, happened, outages, deaths_s):
        return str(asked)
    return ""


def finding_of_body(
    answered: Answered, happened: Sequence[Happened], outages: Iterable[Outage] = (), deaths_s: Iterable[float] = ()
) -> str:
    """What is wrong with what came of a random body; "" if nothing is."""
    is_excused = answered.status != _FAULTY and bool(excuse(answered, happened, outages, deaths_s))
    return "" if answered.is_well or is_excused else f"a random body: {answered}"


async def watch_progress(
    running: Callable[[], Sequence[Asked]],
    is_excused: Callable[[], bool],
    stall_s: float,
    found: Callable[[str], None],
) -> None:
    """Report, once each, the requests that make no progress for `stall_s`. Time that is
    excused, because the router is frozen or dead or there is no decode node, does not count."""
    reported: set[int] = set()
    credit_s, last_s = 0.0, time.monotonic()
    credits_s: dict[int, float] = defaultdict(float)
    while True:
        await asyncio.sleep(0.5)
        now_s = time.monotonic()
        credit_s, last_s = (now_s - last_s if is_excused() else max(0.0, now_s - last_s - 1.0)), now_s
        for asked in running():
            if asked.mode == WHOLE:
                continue
            if asked.last_s > now_s - 1.0:
                credits_s[asked.number] = 0.0
            credits_s[asked.number] += credit_s
            silent_s = now_s - asked.last_s - credits_s[asked.number]
            if silent_s > stall_s and asked.number not in reported:
                reported.add(asked.number)
                found(f"no progress for {silent_s:.1f} s: {asked}")


def long_gap(asked: Asked) -> str:
    """The longest gap of a request that has ended, in words; "" if it is short."""
    gap_s, end_s = max(((after_s - before_s, after_s) for before_s, after_s in _gaps(asked)), default=(0.0, 0.0))
    ago_s = time.monotonic() - end_s
    return f"gap of {gap_s:.1f} s that ended {ago_s:.1f} s ago: {asked}" if gap_s > _LONG_GAP_S else ""


def _gaps(asked: Asked) -> Iterator[tuple[float, float]]:
    """The waits of each choice for its next tokens, from the asking on."""
    return chain.from_iterable(pairwise([asked.begun_s, *moments]) for moments in asked.moments_s)


@dataclass(frozen=True, slots=True)
class Thaw:
    """A stream that was open when a frozen router went on. `late_s`: after how long it went on or ended too. `held_s`:
    how long that was after the last fault that was there meanwhile; `others`: the kinds of these but the freeze."""

    asked: Asked
    late_s: float
    held_s: float
    others: frozenset[str]

    def __str__(self) -> str:
        others = f"; meanwhile: {', '.join(sorted(self.others))}" if self.others else ""
        what = f"{self.late_s:.1f} s after the router, {self.held_s:.1f} s after the last fault"
        return f"went on or ended {what}{others}: {self.asked}"


def after_thaws(asked: Sequence[Asked], happened: Sequence[Happened]) -> list[Thaw]:
    """All streams that were open when a frozen router went on, for each time."""
    found = []
    for freeze in happened:
        thawed_s = freeze.ended_s
        if freeze.fault.kind != "router-freeze" or thawed_s is None:
            continue
        for each in asked:
            moments_s = sorted(chain.from_iterable(each.moments_s))
            if moments_s and each.ended_s is not None and moments_s[0] < thawed_s < each.ended_s:
                on_s = next((moment_s for moment_s in moments_s if moment_s > thawed_s), each.ended_s)
                found.append(_thaw(each, freeze, thawed_s, on_s, happened))
    return found


def _thaw(asked: Asked, freeze: Happened, thawed_s: float, on_s: float, happened: Sequence[Happened]) -> Thaw:
    """Of a stream that went on at `on_s`."""
    others = [
        each
        for each in happened
        if each is not freeze and each.begun_s < on_s and (each.ended_s or on_s) + _AFTER_FAULT_S > freeze.begun_s
    ]
    last_s = max([thawed_s, *(min(each.ended_s or on_s, on_s) for each in others)])
    return Thaw(asked, on_s - thawed_s, on_s - last_s, frozenset(each.fault.kind for each in others))


def gaps_by_kind(asked: Sequence[Asked], happened: Sequence[Happened]) -> Mapping[str, list[float]]:
    """The gaps of all streams in seconds, by the kind of the fault that fell into them or ended shortly before. Where
    several did, the router's counts, and otherwise they are "several"."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in asked:
        for before_s, after_s in _gaps(each):
            if after_s - before_s < GAP_S:
                continue
            hit = {
                each.fault.kind
                for each in happened
                if each.begun_s < after_s and (each.ended_s or after_s) + _AFTER_FAULT_S > before_s
            }
            of_router = sorted(kind for kind in hit if kind.startswith("router-"))
            kinds = of_router or sorted(hit) or ["none"]
            found[kinds[0] if of_router or len(kinds) == 1 else "several"].append(after_s - before_s)
    return found


async def quiescence(deployment: Deployment) -> list[str]:
    """What is not as it is without requests, once every node has joined and had time; empty if all is well."""
    if not await deployment.all_ready(_QUIET_S):
        missing = [member for member in deployment.members if not member.is_ready]
        logs = [f"{member.name}:\n{tail(member.node)}" for member in missing if member.node is not None]
        return [f"not every node has joined after {_QUIET_S:g} s", *logs]
    until_s = time.monotonic() + _QUIET_S
    while True:
        left = await asyncio.to_thread(_unsettled, deployment)
        if not left or time.monotonic() > until_s:
            return [f"not settled after {_QUIET_S:g} s: {text}" for text in left]
        await asyncio.sleep(_LOOK_S)


def _unsettled(deployment: Deployment) -> list[str]:
    found = []
    try:
        for member in deployment.members:
            if member.node is not None and (text := member.node.unsettled()):
                found.append(text)
        metrics = deployment.router.metrics()
        if num_in_flight := metrics.value("num_requests_running"):
            found.append(f"router: {num_in_flight} in flight")
        if load := metrics.value("node_load"):
            found.append(f"router: {load} legs are counted at nodes")
    except OSError as error:
        found.append(f"a program does not answer: {error}")
    return found


def note_footprints(deployment: Deployment) -> None:
    """What the programs hold now is what they may hold at the end."""
    deployment.router_baseline = Footprint.of(deployment.router.process.pid)
    for member in deployment.members:
        assert member.node is not None
        member.baseline = Footprint.of(member.node.process.pid)


def footprints(deployment: Deployment) -> tuple[list[str], list[str]]:
    """(lines for the report, what has grown too much): every program against the first life of its role."""
    lines, grown = [], []
    by_role: dict[str, Footprint] = {}
    for member in deployment.members:
        if member.baseline is not None:
            by_role.setdefault(member.role, member.baseline)
    programs: list[tuple[str, Program | None, Footprint | None]] = [
        ("router", deployment.router, deployment.router_baseline)
    ]
    programs += [(member.name, member.node, by_role.get(member.role)) for member in deployment.members]
    for name, program, before in programs:
        if program is None or before is None or not program.is_running:
            continue
        now = Footprint.of(program.process.pid)
        line = f"{name}: {now}; undisturbed {before}"
        lines.append(line)
        if (
            now.num_files > before.num_files + _MORE_FILES * (len(deployment.members) - 1)
            or now.num_threads > before.num_threads + _MORE_THREADS
            or now.num_bytes > before.num_bytes + _MORE_BYTES
        ):
            grown.append(f"it holds more than it should: {line}")
    return lines, grown


async def stop_all(deployment: Deployment, *, has_private_shm: bool) -> list[str]:
    """SIGTERM for every program; what did not end well, or is left then."""
    await deployment.stop_watching()
    found = []
    children = {
        child
        for program in _programs(deployment)
        if program.is_running
        for child in psutil.Process(program.process.pid).children(recursive=True)
    }
    for program in _programs(deployment):
        try:
            await asyncio.to_thread(program.stop)
        except (AssertionError, psutil.Error) as error:
            found.append(f"{program.name}: {error}")
    found += [f"process {child.pid} is left" for child in children if child.is_running()]
    if has_private_shm:
        found += [f"segment {name} is left" for name in os.listdir("/dev/shm") if name.startswith("baton-")]
    return found


def _programs(deployment: Deployment) -> list[Program]:
    nodes = [member.node for member in deployment.members if member.node is not None]
    machines = [member.machine.program for member in deployment.members if member.machine is not None]
    return [*nodes, *machines, deployment.router]


def tails(deployment: Deployment) -> str:
    """The ends of all logs."""
    return "\n".join(f"{program.name}:\n{tail(program, 20)}" for program in _programs(deployment))
