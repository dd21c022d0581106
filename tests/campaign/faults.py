"""Makes planned faults happen, each in a task of its own, and undoes them.

Knows how to hurt a program or a link and nothing of what should happen then. Whatever ends the campaign, stopped
processes are continued, links healed and /dev/shm emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.campaign import poison, thread_limit, tier_faults
from tests.campaign.deployment import Deployment, Member, kill, send, until
from tests.campaign.proxy import DOWN, UP, LinkProxy
from tests.campaign.schedule import STORE_LINK, Fault
from tests.system.harness import MODEL_NAME, Program

SHM = Path("/dev/shm")
_FILL = SHM / "campaign-fill"
_CYCLE_S = 0.2
_AGENT = "baton.kvtransfer.transports.nixl"
_RANK = "baton.ranks"
_DRAIN_S = 60.0
_DRAIN_ORDER_S = 5.0
_EXCUSED_S = 3.0
"""So long after it has everything again, a program may still end of what it lacked."""
_NO_FOLDER = ("kv-remove", "kv-read-only")
"""No node with a disk tier starts while these last."""
_STARTING_S = 10.0
"""So long a start may take that has begun meanwhile."""
_WATCH_S = 1.0
"""By then it has been noticed that a node has ended."""


_NEEDED_TO_START = ("router-disk-full", "router-threads")
"""No program starts without these: it could not even say so where its output is a file."""
_LOSS, _JITTER_S, _LIES = 1 / 30, 0.1, 0.2
_TAKEN: Mapping[str, tuple[int, Callable[[psutil.Process], int]]] = {
    "descriptors": (resource.RLIMIT_NOFILE, lambda process: int(process.num_fds())),
    "memory": (resource.RLIMIT_AS, lambda process: int(process.memory_info().vms)),
    "disk-full": (resource.RLIMIT_FSIZE, lambda process: 0),
}
"""Kinds of faults: the resource, and how much of it a process has now."""


@dataclass(slots=True)
class Happened:
    """A fault that was made, with the moments (`time.monotonic()`) when it began and ended."""

    fault: Fault
    begun_s: float
    ended_s: float | None = None


class Injector:
    """See the module. `happened` lists the faults made so far."""

    def __init__(self, deployment: Deployment, note: Callable[[str], None], found: Callable[[str], None]) -> None:
        self.happened: list[Happened] = []
        self._deployment = deployment
        self._note, self._found = note, found
        self._tasks: list[asyncio.Task[None]] = []
        self._limited: set[tuple[int, int]] = set()

    async def run(self, faults: list[Fault]) -> None:
        """Make all faults at their times, and return when the last has ended."""
        begun_s = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, begun_s + fault.at_s - time.monotonic()))
            self._tasks.append(asyncio.ensure_future(self._make(fault)))
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Stop what is going on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        _FILL.unlink(missing_ok=True)

    async def _make(self, fault: Fault) -> None:
        happened = Happened(fault, time.monotonic())
        self.happened.append(happened)
        self._note(f"fault {fault}")
        try:
            if fault.is_of_router:
                await self._hit_router(fault)
            elif fault.link:
                await self._hit_link(fault, self._link_of(fault))
            elif fault.is_of_tiers:
                await self._hit_tiers(fault)
            else:
                await self._hit_node(fault, self._deployment.member(fault.target))
        finally:
            happened.ended_s = time.monotonic()
            self._note(f"fault #{fault.number} is over")

    def _link_of(self, fault: Fault) -> LinkProxy:
        tiers = self._deployment.tiers
        if fault.link == STORE_LINK and tiers is not None:
            return tiers.link
        member = self._deployment.member(fault.target)
        return member.control if fault.link == "control" else member.peer

    async def _hit_tiers(self, fault: Fault) -> None:
        if self._deployment.tiers is None:
            return
        if fault.kind not in _NO_FOLDER:
            await tier_faults.make(fault, self._deployment.tiers)
            return
        with _excused([each.start_excuses for each in self._deployment.members], "it had no folder"):
            await tier_faults.make(fault, self._deployment.tiers)
            await asyncio.sleep(_STARTING_S)

    async def _hit_router(self, fault: Fault) -> None:
        router = self._deployment.router
        if fault.kind in _NEEDED_TO_START and not router.ready:
            return
        if fault.kind == "router-kill":
            self._deployment.is_router_meant_to_end = True
            self._deployment.router_delay_s = fault.lasts_s
            kill(router)
            await until(lambda: self._deployment.router is not router and bool(self._deployment.router.ready), _DRAIN_S)
        elif fault.kind == "router-disk-full":
            await self._limit(router, *_TAKEN["disk-full"], fault.lasts_s)
        elif fault.kind == "router-memory":
            with _excused([self._deployment.router_excuses], "it had no memory left"):
                await self._limit(router, *_TAKEN["memory"], fault.lasts_s)
                await asyncio.sleep(_EXCUSED_S)
        elif fault.kind == "router-threads":
            await _take_threads(router, fault.lasts_s)
        else:
            await _stop_for(router, fault.lasts_s, 1.0 if fault.kind == "router-freeze" else fault.strength)

    async def _hit_node(self, fault: Fault, member: Member) -> None:
        match fault.kind:
            case "kill":
                self._kill(member, fault.lasts_s)
            case "poison":
                await self._poison(poison.PROMPT if fault.strength < 0.5 else poison.LONG_PROMPT)
            case "kill-together":
                for each in self._deployment.members:
                    if each.role == "decode":
                        self._kill(each, fault.lasts_s)
                        await asyncio.sleep(fault.strength * 0.2)
            case "restart" | "drain":
                await self._restart(member, fault.lasts_s, by_router=fault.kind == "drain")
            case "freeze" | "slow":
                if member.running is not None:
                    share = 1.0 if fault.kind == "freeze" else 0.3 + 0.6 * fault.strength
                    await _stop_for(member.running, fault.lasts_s, share)
            case "descriptors" | "memory" | "disk-full":
                await self._take(fault.kind, member, fault.lasts_s)
            case "threads":
                if member.running is not None and member.is_ready:
                    await _take_threads(member.running, fault.lasts_s)
            case "shm-full":
                await self._fill_shm(member, fault.lasts_s)
            case "kill-rank":
                await self._kill_rank(member, fault)
            case "freeze-rank":
                await self._freeze_rank(member, fault)
            case _:
                _kill_agents(member)

    async def _poison(self, prompt: Sequence[int]) -> None:
        deployment = self._deployment
        if deployment.num_poisons:
            return
        deployment.num_poisons += 1
        before = {member.name: len(member.statuses) for member in deployment.members}
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": 8, "ignore_eos": True}
        status = 0
        try:
            url = f"{deployment.url}/v1/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                status, text = answer.status, await answer.text()
            self._note(f"the poison request ended with {status}: {text[:300]}")
        except (aiohttp.ClientError, OSError) as error:
            self._note(f"the poison request got no answer: {error}")
        await asyncio.sleep(_WATCH_S)
        deployment.num_poisons -= 1
        deaths = {member.name: member.statuses[before[member.name] :] for member in deployment.members}
        if finding := poison.finding_of(status, deaths):
            self._found(finding)

    def _kill(self, member: Member, delay_s: float) -> None:
        if member.running is not None:
            member.is_meant_to_end, member.delay_s = True, delay_s
            kill(member.running)

    async def _kill_rank(self, member: Member, fault: Fault) -> None:
        """Its node has to end, and nothing else."""
        node, rank = member.running, _rank_of(member, fault.choice)
        if node is None or rank is None or member.is_meant_to_end:
            return
        member.is_meant_to_end, member.delay_s = True, fault.lasts_s
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        if not await until(lambda: not node.is_running, _DRAIN_S):  # it may be frozen, too
            self._found(f"{node.name} has not ended {_DRAIN_S:g} s after one of its ranks was killed")

    async def _freeze_rank(self, member: Member, fault: Fault) -> None:
        """Its node goes on when it does, or ends because a step takes too long."""
        rank = _rank_of(member, fault.choice)
        if rank is None:
            return
        with _excused([member.excuses], "one of its ranks stood still"), contextlib.suppress(psutil.NoSuchProcess):
            try:
                rank.suspend()
                await asyncio.sleep(fault.lasts_s)
            finally:
                rank.resume()
            await asyncio.sleep(_EXCUSED_S)

    async def _restart(self, member: Member, delay_s: float, *, by_router: bool) -> None:
        node = member.running
        if node is None or not member.is_ready or member.is_meant_to_end:
            return
        member.is_meant_to_end, member.delay_s = True, delay_s
        if not by_router or not await self._ask_to_drain(member.name):
            send(node, signal.SIGTERM)
        if not await until(lambda: not node.is_running, _DRAIN_S):
            self._found(f"{node.name} has not ended {_DRAIN_S:g} s after it was told to")
            kill(node)
        elif node.process.returncode not in (0, -signal.SIGKILL) and not member.excuses:
            self._found(f"{node.name} exited with {node.process.returncode} after it was told to end")

    async def _ask_to_drain(self, name: str) -> bool:
        """Whether the router took the order; not while it is away, or does not know the node."""
        body = {"node": name, "restart": True}
        try:
            url, timeout = f"{self._deployment.url}/admin/drain", aiohttp.ClientTimeout(total=_DRAIN_ORDER_S)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=body) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    async def _take(self, what: str, member: Member, lasts_s: float) -> None:
        """The node gets no more of something than it has now. It may end of having no memory, and of nothing else."""
        if member.running is None or not member.is_ready:
            return
        kind, now = _TAKEN[what]
        with _excused([member.excuses] if what == "memory" else [], "it had no memory left"):
            await self._limit(member.running, kind, now, lasts_s)
            await asyncio.sleep(_EXCUSED_S)

    async def _limit(self, program: Program, kind: int, now: Callable[[psutil.Process], int], lasts_s: float) -> None:
        """Set a soft limit to what `now` says, and undo it later, also for what was started meanwhile. A limit that
        another fault has set, and will undo, stays as it is."""
        limited = (program.process.pid, kind)
        if limited in self._limited:
            await asyncio.sleep(lasts_s)
            return
        with contextlib.suppress(OSError, psutil.Error):
            process = psutil.Process(program.process.pid)
            soft, hard = resource.prlimit(process.pid, kind)
            resource.prlimit(process.pid, kind, (now(process), hard))
            self._limited.add(limited)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                self._limited.remove(limited)
                if program.is_running:
                    for each in (process, *process.children(recursive=True)):
                        resource.prlimit(each.pid, kind, (soft, hard))

    async def _fill_shm(self, member: Member, lasts_s: float) -> None:
        if _FILL.exists():
            return
        with _excused([each.excuses for each in self._deployment.members], "/dev/shm is full"):
            try:
                with _FILL.open("wb") as file:
                    free_bytes = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_bsize
                    with contextlib.suppress(OSError):  # a node has taken some of it meanwhile: it is full anyway
                        os.posix_fallocate(file.fileno(), 0, max(1, free_bytes))
                await asyncio.sleep(lasts_s / 4)
                self._kill(member, 0.1)
                await asyncio.sleep(lasts_s * 3 / 4)
            finally:
                _FILL.unlink(missing_ok=True)
            await asyncio.sleep(_EXCUSED_S)

    async def _hit_link(self, fault: Fault, link: LinkProxy) -> None:
        state = link.state
        match fault.kind:
            case "cut":
                state.is_cut = True
                link.reset()
            case "delay":
                state.delay_s = 0.01 * 50**fault.strength
            case "throttle":
                state.bytes_per_s = 2048 * 32**fault.strength
            case "loss":
                state.loss, state.jitter_s = _LOSS, _JITTER_S
            case "flip":
                state.flips = _LIES
            case "replay":
                state.replays = _LIES
            case "hole":
                state.held |= {UP, DOWN}
            case _:
                state.held |= {UP} if fault.strength < 0.5 else {DOWN}
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if link.state is state:
                link.heal()
            if fault.kind.startswith("hole") and fault.choice < 0.5:
                link.reset()


@contextlib.contextmanager
def _excused(excuses: Sequence[list[str]], why: str) -> Iterator[None]:
    """Programs with these excuses may end by themselves meanwhile."""
    for each in excuses:
        each.append(why)
    try:
        yield
    finally:
        for each in excuses:
            each.remove(why)


async def _take_threads(program: Program, lasts_s: float) -> None:
    with contextlib.suppress(OSError), thread_limit.no_more_threads(program.process.pid):
        await asyncio.sleep(lasts_s)


async def _stop_for(program: Program, lasts_s: float, share: float) -> None:
    """Stop a process for `share` of the time."""
    until_s = time.monotonic() + lasts_s
    try:
        while program.is_running and (left_s := until_s - time.monotonic()) > 0:
            send(program, signal.SIGSTOP)
            await asyncio.sleep(min(left_s, _CYCLE_S * share if share < 1.0 else left_s))
            send(program, signal.SIGCONT)
            if share < 1.0:
                await asyncio.sleep(_CYCLE_S * (1.0 - share))
    finally:
        send(program, signal.SIGCONT)


def _rank_of(member: Member, choice: float) -> psutil.Process | None:
    """One of the ranks that are processes of a node which is ready; None without any."""
    ranks = []
    if member.running is not None and member.is_ready:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(member.running.process.pid).children()
            children += member.machine.ranks if member.machine is not None else []
            ranks = [child for child in children if _RANK in child.cmdline()]
    return ranks[int(choice * len(ranks))] if ranks else None


def _kill_agents(member: Member) -> None:
    if member.running is None:
        return
    if not member.is_ready:
        member.is_meant_to_end = True  # a node does not start without its agent
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(member.running.process.pid).children(recursive=True):
            if any(_AGENT in word for word in child.cmdline()):
                child.kill()
