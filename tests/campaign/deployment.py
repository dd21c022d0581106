"""The programs of a campaign: a router and nodes behind proxies, which are started again whenever they end.

Owns the processes, their ports and proxies, and who was meant to die. A program that ends without having been meant to
is a finding, except for a node that refuses to start while something it needs was taken away. Kills only what it
started, by process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.engine.settings import OWN
from baton.launch.key import write_key
from tests.campaign import poison
from tests.campaign.kv_tiers import KvTiers
from tests.campaign.proxy import LinkProxy
from tests.campaign.settings import NO_TIERS, VALKEY, CampaignSettings
from tests.free_port import free_port
from tests.system.harness import MODEL_NAME, Node, Program, forked_with, started
from tests.system.spread import Machine

NODE_SCRIPT = str(Path(__file__).with_name("node_process.py"))
_ROUTER_SCRIPT = str(Path(__file__).parents[1] / "stations" / "router_process.py")
NODE_WAIT_S = 60.0
RESUMABLE_S = 60.0
_WATCH_S = 0.05
_NUM_BLOCKS = {"prefill": 1024, "decode": 768}
_DRAFTS = '{"method": "suffix", "num_speculative_tokens": 6}'
_NUM_BLOCKS_WITH_TIERS = {"prefill": 64, "decode": 128}
"""Prompts that come again are mostly evicted by then."""
Note = Callable[[str], None]


class Member:
    """A node over its lives, which ended with `statuses` where nothing excused it. `node` is the current one; `machine`
    runs a part of its ranks, in all its lives. `delay_s` is waited before the next. `excuses`: why it may end by itself
    or not start now; empty if it may not. `start_excuses`: why it may not start now, but has to go on once it has."""

    def __init__(self, role: str, index: int, port: int) -> None:
        self.role, self.index = role, index
        self.name = f"{role}-{index}"
        self.port = port
        self.peer = LinkProxy(port, seed=2 * index)
        self.control = LinkProxy(0, seed=2 * index + 1)
        self.rank_port = free_port()
        self.machine: Machine | None = None
        self.num_lives = 0
        self.statuses: list[int] = []
        self.delay_s = 0.0
        self.is_meant_to_end = False
        self.is_ready = False
        self.excuses: list[str] = []
        self.start_excuses: list[str] = []
        self.baseline: Footprint | None = None
        self.node: Node | None = None

    @property
    def running(self) -> Node | None:
        """The node, if it runs."""
        return self.node if self.node is not None and self.node.is_running else None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: files, threads, and memory of its own, which is what is resident without segments and files
    that are mapped: a prefill node maps the pools of the decode nodes that it is connected with."""

    num_files: int
    num_threads: int
    num_bytes: int

    @staticmethod
    def of(pid: int) -> Footprint:
        """Of a process now. Raises `psutil.Error`."""
        process = psutil.Process(pid)
        memory = process.memory_info()
        return Footprint(process.num_fds(), process.num_threads(), memory.rss - memory.shared)

    def __str__(self) -> str:
        return f"{self.num_files} files, {self.num_threads} threads, {self.num_bytes >> 20} MiB"


@dataclass(slots=True)
class Outage:
    """A time (`time.monotonic()`) without any decode node, or without a second one. `ended_s`: None while it lasts."""

    begun_s: float
    ended_s: float | None = None


class Deployment:
    """See the module. `note` takes lines for the timeline, `found` what must not happen."""

    def __init__(self, settings: CampaignSettings, model: Path, note: Note, found: Note) -> None:
        self.members = [Member("prefill", index, free_port()) for index in range(settings.num_prefill)]
        self.members += [Member("decode", index, free_port()) for index in range(settings.num_decode)]
        self.http_port, self.control_port = free_port(), free_port()
        self.router_baseline: Footprint | None = None
        self.is_router_meant_to_end = False
        self.router_excuses: list[str] = []
        self.router_delay_s = 0.0
        self.num_poisons = 0
        self.outages: list[Outage] = []
        self.scarcities: list[Outage] = []
        self.deaths_s: list[float] = []
        has_tiers = settings.tiers != NO_TIERS
        self.tiers = KvTiers(settings.folder / "kv", has_server=settings.tiers == VALKEY) if has_tiers else None
        self._settings = settings
        self._model = model
        self._key = None if settings.is_plaintext else settings.folder / "cluster.key"
        self._note, self._found = note, found
        self._router: Program | None = None
        self._num_routers = 0
        self._watchers: list[asyncio.Task[None]] = []
        self._start = started if settings.has_real_starts else forked_with(*_modules_of(settings))

    @property
    def router(self) -> Program:
        """The router of now."""
        assert self._router is not None
        return self._router

    @property
    def url(self) -> str:
        """Of the router, over all its lives."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def _key_flags(self) -> tuple[str, ...]:
        return () if self._key is None else ("--cluster-key", str(self._key))

    def pids(self) -> list[tuple[str, int]]:
        """Names and processes of the programs that are ready now."""
        programs = [("router", self.router)] if self.router.ready else []
        programs += [(each.name, each.running) for each in self.members if each.is_ready and each.running is not None]
        return [(name, program.process.pid) for name, program in programs]

    def member(self, name: str) -> Member:
        """By the name of a target."""
        return next(member for member in self.members if member.name == name)

    async def start(self) -> None:
        """Start everything, and return when all nodes have joined."""
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        if self._key is not None and not self._key.exists():
            write_key(self._key)
        if self.tiers is not None:
            await self.tiers.start()
        self._spawn_router()
        await asyncio.to_thread(self.router.wait_ready)
        for member in self.members:
            await member.peer.start()
            member.control.target_port = self.control_port
            await member.control.start()
            if self._settings.rank_machines > 1:
                driver, folder = f"127.0.0.1:{member.rank_port}", self._settings.folder
                name = f"{member.name}-machine"
                member.machine = await asyncio.to_thread(
                    Machine, name, self._model, folder, driver, "127.0.0.2", *self._key_flags
                )
            self._spawn(member)
        for member in self.members:
            assert member.node is not None
            await asyncio.to_thread(member.node.wait_ready)
            member.is_ready = True
        self._watchers = [asyncio.ensure_future(self._watch(member)) for member in self.members]
        self._watchers.append(asyncio.ensure_future(self._watch_router()))
        self._watchers.append(asyncio.ensure_future(self._watch_outages()))

    async def all_ready(self, timeout_s: float) -> bool:
        """Wait until every node has joined; False if one does not."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if all(member.is_ready and member.running for member in self.members) and await self._num_joined() == len(
                self.members
            ):
                return True
            await asyncio.sleep(0.2)
        return False

    async def stop_watching(self) -> None:
        """From now on nothing is started again, and a failure of a watcher is raised."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        for result in await asyncio.gather(*watchers, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def close(self) -> None:
        """Kill whatever is left."""
        for watcher in self._watchers:
            watcher.cancel()
        for program in [self._router, *(member.node for member in self.members)]:
            if program is not None:
                program.kill()
        for member in self.members:
            if member.machine is not None:
                member.machine.program.kill()
            await member.peer.close()
            await member.control.close()
        if self.tiers is not None:
            await self.tiers.close()

    async def _num_joined(self) -> int:
        try:
            metrics = await asyncio.to_thread(self.router.metrics)
            return metrics.value("nodes")
        except (OSError, KeyError):
            return -1

    def _spawn_router(self) -> None:
        self._num_routers += 1
        flags = ["--port", str(self.http_port), "--control-port", str(self.control_port)]
        flags += ["--served-model-name", MODEL_NAME, "--node-wait-s", f"{NODE_WAIT_S:g}", "--request-timeout-s", "300"]
        flags += ["--max-attempts", str(self._settings.max_attempts)]
        folder = self._settings.folder
        flags += ["--resumable-streams-s", f"{RESUMABLE_S:g}", "--journal-dir", str(folder / "journals")]
        flags += ["--audit-log", str(folder / "audit.jsonl")]
        command = [_ROUTER_SCRIPT, str(folder / "router.stamps"), str(self._model), *flags, *self._key_flags]
        self._router = Program(f"router-life-{self._num_routers}", command, folder, self._start)

    def _spawn(self, member: Member) -> None:
        member.num_lives += 1
        settings = self._settings
        program = "node" if settings.is_mixed else f"{member.role}_node"
        command = [NODE_SCRIPT, program, str(member.peer.port), str(settings.step_s)]
        command += [str(settings.folder / f"{member.name}.stamps"), str(self._model)]
        command += ["--router", f"tcp://127.0.0.1:{member.control.port}", "--port", str(member.port)]
        command += ["--node-id", member.name, "--num-threads", "1", "--batch-invariant", "--dtype", settings.dtype]
        command += ["--kv-cache-dtype", settings.kv_cache_dtype, *self._key_flags]
        command += ["--role", member.role] * settings.is_mixed
        command += ["--speculative-config", _DRAFTS if settings.drafts and member.index % 2 else "none"]
        command += ["--tensor-parallel-size", str(settings.num_ranks), "--rank-pools", settings.rank_pools]
        command += ["--kv-checksum", "dot64"] * (settings.rank_pools == OWN)
        if settings.rank_machines > 1:
            command += ["--rank-machines", str(settings.rank_machines), "--rank-port", str(member.rank_port)]
        num_blocks = _NUM_BLOCKS if self.tiers is None else _NUM_BLOCKS_WITH_TIERS
        command += ["--kv-transport", settings.transport, "--num-blocks", str(num_blocks[member.role])]
        command += ["--device", "cpu", *(() if self.tiers is None else self.tiers.flags(member.role))]
        name = f"{member.name}-life-{member.num_lives}"
        member.node = Node("decode" if settings.is_mixed else member.role, name, command, settings.folder, self._start)

    async def _watch(self, member: Member) -> None:
        while True:
            node = member.node
            if node is not None and not node.is_running:
                self._judge_end(member, node)
                member.is_ready = False
                await asyncio.sleep(member.delay_s)
                member.is_meant_to_end, member.delay_s = False, 0.2
                self._spawn(member)
                self._note(f"{member.name} is started again, life {member.num_lives}")
            elif node is not None and not member.is_ready:
                await self._look_for_readiness(member, node)
            await asyncio.sleep(_WATCH_S)

    async def _look_for_readiness(self, member: Member, node: Node) -> None:
        with contextlib.suppress(AssertionError, OSError, psutil.Error):
            await asyncio.to_thread(node.wait_ready)
            member.is_ready = True
            self._note(f"{member.name} is ready again")

    def _judge_end(self, member: Member, node: Node) -> None:
        status = node.process.returncode
        assert status is not None  # it is called when the process has ended
        if status:
            self.deaths_s.append(time.monotonic())
        if excuses := [*member.excuses, *(() if member.is_ready else member.start_excuses)]:
            self._note(f"{member.name} has ended with {status}: {', '.join(excuses)}")
            return
        member.statuses.append(status)
        if member.is_meant_to_end or (self.num_poisons and status == poison.ABORTED):
            self._note(f"{member.name} has ended with {status}")
            return
        self._found(f"{member.name} ended by itself with {status}:\n{tail(node)}")

    async def _watch_outages(self) -> None:
        decodes = [member for member in self.members if member.role == "decode"]
        while True:
            num_there = sum(member.is_ready and member.running is not None for member in decodes)
            if (out_s := _noted(self.outages, is_out=not num_there)) is not None:
                self._note(f"there was no decode node for {out_s:.1f} s")
            _noted(self.scarcities, is_out=num_there < 2)
            await asyncio.sleep(_WATCH_S)

    async def _watch_router(self) -> None:
        while True:
            if not self.router.is_running:
                if not self.is_router_meant_to_end and not self.router_excuses:
                    self._found(
                        f"the router ended by itself with {self.router.process.returncode}:\n{tail(self.router)}"
                    )
                await asyncio.sleep(self.router_delay_s)
                self.is_router_meant_to_end = False
                self._spawn_router()
                with contextlib.suppress(AssertionError, OSError, psutil.Error):  # it was killed while it started
                    await asyncio.to_thread(self.router.wait_ready)
                    self._note("the router is ready again")
            await asyncio.sleep(_WATCH_S)


def _modules_of(settings: CampaignSettings) -> Sequence[str]:
    """What nodes import for a model that sees, which takes seconds."""
    name = re.sub(r"[.-]", "_", settings.model)
    return ("baton.engine.models.vision.tower", f"transformers.models.{name}.modeling_{name}") if settings.sees else ()


def _noted(outages: list[Outage], *, is_out: bool) -> float | None:
    """Begin an outage, or end the last one; how long it was."""
    last = outages[-1] if outages and outages[-1].ended_s is None else None
    if is_out and last is None:
        outages.append(Outage(time.monotonic()))
    elif not is_out and last is not None:
        last.ended_s = time.monotonic()
        return last.ended_s - last.begun_s
    return None


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition()` holds; False if it does not within `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not (holds := condition()) and time.monotonic() < until_s:  # noqa: ASYNC110  # nothing tells when a process ends
        await asyncio.sleep(_WATCH_S)
    return holds


def tail(program: Program, num_lines: int = 12) -> str:
    """The end of its log."""
    return "\n".join(f"    {line}" for line in program.err.splitlines()[-num_lines:])


def send(program: Program, number: int) -> None:
    """Send a signal to a process that may have ended."""
    if program.is_running:
        program.signal(number)


def kill(program: Program) -> None:
    """SIGKILL without waiting."""
    send(program, signal.SIGKILL)
