"""Crowds at a router: clients that drop, that do not read, that are too many, and nodes that come and go.

    python -m tests.router.crowds storm --number 10000
    python -m tests.router.crowds readers --number 200 --seconds 60
    python -m tests.router.crowds overload --factor 10 --seconds 20
    python -m tests.router.crowds joins --number 250 --seconds 60
    python -m tests.router.crowds rush --number 5000

The router is the real program; its nodes have no model and compute at a fixed pace. Prints what was measured, and exits
with 1 when something does not hold: a request that is neither answered nor refused, memory beyond its bound, load that
is left, a turn of the event loop in which it worked for more than 200 ms. Other times depend on how busy the machine
is, so they are told and not asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from baton.wire.messages.membership import DECODE, live_key
from baton.wire.messages.output import TokenEvent, Tokens
from tests.checkpoints import make_checkpoint
from tests.router.bystanders import watching
from tests.router.fake_node import FakeNode, LegMessage, make_hello
from tests.router.http_client import Connection, parse_reply, request_bytes
from tests.router.router_process import RouterProcess, router_process

PATH = "/v1/completions"
NUM_SEQS, STEP_S = 8, 0.01
NUM_SEQS_OF_READERS = 64
"""More readers than that hold all of the batch, until they leave or are paused."""
PATIENCE_S = 60.0
MAX_READERS_BYTES, MAX_STORM_BYTES = 50 * 2**20, 32 * 2**20
MAX_OWN_LAG_S = 0.2
"""Of processor time that the event loop itself took, so it does not depend on how busy the machine is."""
_AT_ONCE = 200
_NUM_ADDRESSES = 8
_WORD = "word "


@dataclass(slots=True)
class _Running:
    leg: LegMessage
    num_told: int


class Paced:
    """Lets a fake decode node compute up to `num_seqs` requests at a time, a token of each every `step_s`."""

    def __init__(self, node: FakeNode, num_seqs: int = NUM_SEQS, step_s: float = STEP_S) -> None:
        self.order: list[bytes] = []
        """Handoff ids, as they were given."""
        self._node, self._num_seqs, self._step_s = node, num_seqs, step_s
        self._running: list[_Running] = []
        node.script = self._take
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Compute no more."""
        self._task.cancel()

    def _take(self, node: FakeNode, leg: LegMessage) -> None:
        self.order.append(leg.handoff_id)
        self._running.append(_Running(leg, len(leg.output_ids)))

    async def _run(self) -> None:
        live = self._node.live
        while True:
            await asyncio.sleep(self._step_s)
            self._running = [each for each in self._running if live_key(each.leg.handoff_id, each.leg.attempt) in live]
            if events := [self._next(each) for each in self._running[: self._num_seqs]]:
                self._node.send(Tokens(self._node.hello.epoch, tuple(events)))

    def _next(self, each: _Running) -> TokenEvent:
        leg, index = each.leg, each.num_told
        each.num_told += 1
        is_last = each.num_told == leg.params.max_tokens
        if is_last:
            self._node.live.discard(live_key(leg.handoff_id, leg.attempt))
        return TokenEvent(leg.handoff_id, leg.attempt, index, (70,), (), "length" if is_last else "", 0)


@dataclass(slots=True)
class Outcome:
    """What a client had. `status` 0: the connection broke. `arrivals_s`: of its events."""

    status: int = 0
    is_whole: bool = False
    retry_after: str = ""
    begun_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """Between events."""
        return max((second - first for first, second in pairwise(self.arrivals_s)), default=0.0)


@dataclass(frozen=True, slots=True)
class Door:
    """Where clients reach the router, and the model they ask for."""

    host: str
    port: int
    model: str

    async def connect(self, max_tokens: int, source: str | None = None, **members: Any) -> Connection:
        """A connection on which a stream was asked for. `source`: the address it comes from."""
        local = None if source is None else (source, 0)
        connection = Connection(*await asyncio.open_connection(self.host, self.port, local_addr=local))
        body = {"model": self.model, "prompt": _WORD * 4, "stream": True, "max_tokens": max_tokens, **members}
        await connection.send(request_bytes("POST", PATH, json.dumps(body).encode()))
        return connection

    async def ask(self, max_tokens: int, **members: Any) -> Outcome:
        """A client that reads its answer to the end."""
        outcome = Outcome(begun_s=time.monotonic())
        try:
            connection = await self.connect(max_tokens, **members)
            while data := await connection.reader.read(65536):
                connection.received += data
                outcome.arrivals_s += [time.monotonic()] * data.count(b"data: ")
            connection.break_off()
        except ConnectionError:
            return outcome
        if not connection.received:
            return outcome
        reply = parse_reply(bytes(connection.received))
        outcome.status, outcome.retry_after = reply.status, reply.headers.get("retry-after", "")
        outcome.is_whole = reply.is_whole and b"[DONE]" in reply.body
        return outcome


async def storm(door: Door, number: int) -> None:
    """So many clients that ask and are gone at once, `_AT_ONCE` at a time."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def drop() -> None:
        async with turns:
            connection = await door.connect(1000)
            connection.break_off()

    await asyncio.gather(*(drop() for _ in range(number)))


async def answered(door: Door) -> None:
    """One client that comes back as long as it is refused."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await door.ask(4)).is_whole:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def read_slowly(door: Door, seconds: float, bytes_per_s: int) -> int:
    """One client that reads so much; how many bytes it had."""
    connection = await door.connect(100_000)
    connection.pause()
    try:
        until_s = time.monotonic() + seconds
        num_read = 0
        while time.monotonic() < until_s and bytes_per_s:
            connection.resume()
            num_read += len(await connection.reader.read(bytes_per_s))
            connection.pause()
            await asyncio.sleep(1.0)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))
        return num_read
    finally:
        connection.break_off()


async def rush(door: Door, number: int) -> list[Outcome]:
    """So many clients from `_NUM_ADDRESSES` addresses that all come at the same moment."""
    sources = [f"127.0.0.{place + 2}" for place in range(_NUM_ADDRESSES)]
    asking = (door.ask(4, source=sources[place % _NUM_ADDRESSES]) for place in range(number))
    return await asyncio.gather(*asking)


async def offer(door: Door, per_s: float, seconds: float, max_tokens: int) -> list[Outcome]:
    """Clients that come at that rate, whatever becomes of those before them."""
    begun_s = time.monotonic()
    asking: list[asyncio.Task[Outcome]] = []
    while (place_s := len(asking) / per_s) < seconds:
        await asyncio.sleep(max(0.0, begun_s + place_s - time.monotonic()))
        asking.append(asyncio.create_task(door.ask(max_tokens)))
    return await asyncio.gather(*asking)


def count(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many were answered whole, refused with a time to come back, and anything else."""
    kinds: Counter[str] = Counter()
    for outcome in outcomes:
        is_refused = outcome.status in (429, 503) and outcome.retry_after.isdigit()
        kinds["whole" if outcome.status == 200 and outcome.is_whole else "refused" if is_refused else "other"] += 1
    return kinds


async def settled(is_idle: Callable[[], Awaitable[bool]]) -> None:
    """Wait until nothing is left."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_idle():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class _Measured:
    """The router as a process, and the nodes."""

    def __init__(self, router: RouterProcess, options: argparse.Namespace) -> None:
        host, _, port = router.ready["address"].removeprefix("http://").rpartition(":")
        self.door = Door(host, int(port), router.name)
        self.options = options
        self.node = router.node
        self._router = router
        self._process = psutil.Process(router.process.pid)
        self.faults: list[str] = []

    @property
    def rss(self) -> int:
        found: int = self._process.memory_info().rss
        return found

    def require(self, is_so: bool, what: str) -> None:
        if not is_so:
            self.faults.append(what)

    async def is_idle(self) -> bool:
        return await self.metric("baton:num_requests_running{") == 0 and not self.node.live

    async def metric(self, name: str) -> float:
        connection = Connection(*await asyncio.open_connection(self.door.host, self.door.port))
        await connection.send(request_bytes("GET", "/metrics"))
        lines = parse_reply(await connection.to_end()).body.decode().splitlines()
        connection.break_off()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def look_at_the_loop(self) -> None:
        """How late it was at worst, and how much of that was its own work."""
        lag_s = await self.metric("baton:event_loop_lag_max_seconds ")
        own_s = await self.metric("baton:event_loop_own_lag_max_seconds ")
        _say(f"event loop late by {lag_s * 1000:.0f} ms at worst, by its own work {own_s * 1000:.0f} ms")
        self.require(own_s < MAX_OWN_LAG_S, f"the event loop has worked for {own_s:.2f} s without giving way")

    async def storm(self) -> None:
        """F27."""
        await storm(self.door, 1000)
        await settled(self.is_idle)
        before, number = self.rss, self.options.number
        begun_s = time.monotonic()
        await storm(self.door, number)
        took_s = time.monotonic() - begun_s
        await answered(self.door)
        await settled(self.is_idle)
        grown = self.rss - before
        _say(f"{number} clients that dropped, {number / took_s:.0f} a second; grown by {grown / 2**20:.1f} MiB")
        self.require(grown < MAX_STORM_BYTES, f"the router has grown by {grown} bytes")

    async def readers(self) -> None:
        """F29."""
        seconds, number = self.options.seconds, self.options.number

        async def others() -> list[Outcome]:
            return await asyncio.gather(*(self.door.ask(int(seconds / STEP_S / 2)) for _ in range(4)))

        alone = await others()
        before = most = self.rss
        rates = (1024, 0)
        slow = [asyncio.create_task(read_slowly(self.door, seconds, rates[place % 2])) for place in range(number)]
        await asyncio.sleep(seconds / 4)
        beside = asyncio.create_task(others())
        while not all(task.done() for task in (*slow, beside)):
            most = max(most, self.rss)
            await asyncio.sleep(0.2)
        await settled(self.is_idle)
        grown, pauses = most - before, await self.metric("baton:relay_pauses_total")
        _say(f"{number} clients that read 1 KiB/s or nothing: grown by {grown / 2**20:.1f} MiB, {pauses:g} pauses")
        for name, outcomes in (("alone", alone), ("beside them", await beside)):
            gaps = [second - first for each in outcomes for first, second in pairwise(each.arrivals_s)]
            _say(f"others {name}: gap p50 {_ms(gaps, 50)}, p99 {_ms(gaps, 99)}, {count(outcomes)['whole']} of 4 whole")
            self.require(count(outcomes)["whole"] == 4, f"streams {name} were not whole")
        self.require(grown < MAX_READERS_BYTES, f"the router has grown by {grown} bytes")

    async def overload(self) -> None:
        """F34."""
        num_tokens, seconds = 20, self.options.seconds
        peak_per_s = NUM_SEQS / (num_tokens * STEP_S)
        outcomes: dict[float, list[Outcome]] = {}
        for factor in (0.9, self.options.factor):
            before = self.rss
            begun_s = time.monotonic()
            found = outcomes[factor] = await offer(self.door, factor * peak_per_s, seconds, num_tokens)
            took_s = time.monotonic() - begun_s
            await settled(self.is_idle)
            kinds, grown = count(found), (self.rss - before) / 2**20
            firsts = [each.arrivals_s[0] - each.begun_s for each in found if each.is_whole]
            _say(
                f"{factor:g} of what it can do: {dict(kinds)} in {took_s:.0f} s, {kinds['whole'] / took_s:.1f}/s, "
                f"first token p50 {_ms(firsts, 50)}, p99 {_ms(firsts, 99)}, grown by {grown:.1f} MiB"
            )
            self.require(not kinds["other"], f"{kinds['other']} requests were neither answered nor refused")

    async def rush(self) -> None:
        """`/health` beside thousands of clients that come at once."""
        async with watching(self.door.host, self.door.port, self.door.model) as seen:
            begun_s = time.monotonic()
            outcomes = await rush(self.door, self.options.number)
            took_s = time.monotonic() - begun_s
        await settled(self.is_idle)
        kinds = count(outcomes)
        _say(f"{self.options.number} clients at once: {dict(kinds)} in {took_s:.1f} s; others: {seen}")
        self.require(not kinds["other"], f"{kinds['other']} requests were neither answered nor refused")
        self.require(not seen.num_failed, f"{seen.num_failed} looks at /health failed")

    async def joins(self) -> None:
        """F44."""
        number, seconds = self.options.number, self.options.seconds
        asking = asyncio.create_task(offer(self.door, 0.5 * NUM_SEQS / (20 * STEP_S), seconds, 20))
        await come_and_go(self.node, number, seconds)
        outcomes = await asking
        await settled(self.is_idle)
        kinds, gap_s = count(outcomes), max(each.longest_gap_s for each in outcomes)
        _say(f"{number} nodes came and went: {dict(kinds)}, longest gap {gap_s:.2f} s")
        self.require(not kinds["other"], f"{kinds['other']} requests were neither answered nor refused")


async def come_and_go(like: FakeNode, number: int, seconds: float) -> None:
    """So many nodes like this one join in that time, and soon each leaves or, one in four, dies."""
    others: list[tuple[FakeNode, Paced]] = []
    for place in range(number):
        hello = make_hello(DECODE, fingerprint=like.hello.fingerprint, node_id=f"D{place}")
        node = FakeNode(like._context, like._address, hello)
        others.append((node, Paced(node)))
        await asyncio.sleep(seconds / number)
        if len(others) > 4:
            await _go(*others.pop(0), is_killed=place % 4 == 0)
    for node, pace in others:
        await _go(node, pace, is_killed=False)


async def _go(node: FakeNode, pace: Paced, *, is_killed: bool) -> None:
    if not is_killed:
        node.leave()
        await settled(partial(_has_nothing, node))
    node.die()
    pace.close()


async def _has_nothing(node: FakeNode) -> bool:
    return not node.live


def _ms(values: Sequence[float], percent: int) -> str:
    if len(values) < 2:
        return "-"
    return f"{statistics.quantiles(values, n=100)[percent - 1] * 1000:.0f} ms"


async def _measure(options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="baton-crowds-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny", "llama")
        has_readers = options.crowd == "readers"
        num_seqs, num_queued, queue_s = (
            (NUM_SEQS_OF_READERS, options.number, 60) if has_readers else (NUM_SEQS, options.max_queued, 10)
        )
        flags = (f"--max-queued-requests={num_queued}", f"--max-queue-s={queue_s}", "--max-attempts=20")
        async with router_process(checkpoint, *flags, max_request_tokens=200_000, max_num_seqs=num_seqs) as router:
            pace = Paced(router.node, num_seqs)
            measured = _Measured(router, options)
            await getattr(measured, options.crowd)()
            await measured.look_at_the_loop()
            pace.close()
            return measured.faults


def main(arguments: Sequence[str]) -> int:
    """Run one; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.router.crowds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("crowd", choices=("storm", "readers", "overload", "joins", "rush"))
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--max-queued", type=int, default=64)
    options = parser.parse_args(arguments)
    faults = asyncio.run(_measure(options))
    for fault in faults:
        _say(f"does not hold: {fault}")
    return 1 if faults else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
