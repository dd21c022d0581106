"""How the router bears loads that would hurt: `python -m baton.bench.limits.router_load`.

For each load a router of its own, with a node that has no model. What is reported comes from the router: how late its
event loop ran what was due (its own metric, 50 samples a second), the most memory it had, and how its answers ended.
Loads come from several addresses of the loopback, because the router caps the connections of one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from baton.bench.limits.load_node import LoadNode
from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.engine.models.config import load_config
from baton.engine.models.identity import model_fingerprint
from baton.engine.text.tokenizer import Tokenizer
from baton.runtime.child import PIPE, Child
from baton.wire.errors import RequestFailed

GOAL_P99_S, GOAL_WORST_S, GOAL_RSS_BYTES = 0.05, 0.2, 300 * 2**20
_ROUTER_FLAGS = ("--port=0", "--control-port=0", "--shutdown-timeout-s=1", "--log-level=error")
_INTERVAL_S = 0.02
_READY_S, _WAIT_S = 60.0, 120.0
_CONNECTIONS_PER_ADDRESS = 900
_CONNECTS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Loaded:
    """The router under one load. `p99_s` is the upper end of the bucket in which the 99th percentile lies,
    `worst_own_s` the most for which the loop's own work accounts: the rest is the machine's."""

    load: str
    p99_s: float
    worst_s: float
    worst_own_s: float
    rss_bytes: int
    answers: dict[str, int]

    @property
    def is_good(self) -> bool:
        """Whether the goals are met."""
        return self.p99_s <= GOAL_P99_S and self.worst_s <= GOAL_WORST_S and self.rss_bytes <= GOAL_RSS_BYTES

    def __str__(self) -> str:
        worst = f"worst {self.worst_s * 1000:.0f} ms ({self.worst_own_s * 1000:.0f} ms own work)"
        figures = f"lag p99 <= {self.p99_s * 1000:.0f} ms, {worst}"
        ends = ", ".join(f"{count} x {end}" for end, count in sorted(self.answers.items()))
        verdict = "good" if self.is_good else "ABOVE THE GOAL"
        return f"{self.load:12} {figures}, memory {self.rss_bytes / 2**20:.0f} MiB; {ends}; {verdict}"


Load = Callable[["Target", float], Coroutine[Any, Any, "Counter[str]"]]
"""Puts a load of a size between 0 and 1 on a router; how its answers ended."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the router is."""

    host: str
    port: int

    async def connect(self, number: int, buffer_bytes: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connection `number` of a load, from an address that has not had too many."""
        client = socket.socket()
        client.setblocking(False)
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.bind((f"127.0.0.{2 + number // _CONNECTIONS_PER_ADDRESS}", 0))
        await asyncio.get_running_loop().sock_connect(client, (self.host, self.port))
        return await asyncio.open_connection(sock=client)

    async def ask(self, number: int, path: str, **members: object) -> str:
        """One request on a connection of its own, read to its end; its status, or how it broke."""
        try:
            reader, writer = await self.connect(number)
            try:
                writer.write(_request(path, members))
                head = await asyncio.wait_for(reader.read(2**16), _WAIT_S)
                while await asyncio.wait_for(reader.read(2**20), _WAIT_S):
                    pass
                return head[9:12].decode() or "closed"
            finally:
                writer.transport.abort()
        except (OSError, TimeoutError) as error:
            return type(error).__name__


def _request(path: str, members: dict[str, object]) -> bytes:
    body = json.dumps({"model": DEMO_MODEL_NAME, "ignore_eos": True, **members}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: load\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def prompts(target: Target, size: float) -> Counter[str]:
    """Prompts of 1 MB, two at a time."""
    text = "a word and another " * (2**20 // 19 - 4)
    found: Counter[str] = Counter()
    for _ in range(max(1, round(10 * size))):
        asked = [target.ask(0, "/v1/completions", prompt=text, max_tokens=2) for _ in range(2)]
        found.update(await asyncio.gather(*asked))
    return found


async def choices(target: Target, size: float) -> Counter[str]:
    """128 choices with twenty log probabilities a token, not streamed and streamed; then 16 choices of 1000 tokens."""
    asked: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
    found: Counter[str] = Counter()
    for members in (
        {"n": 128, "max_tokens": max(2, round(60 * size))},
        {"n": 128, "max_tokens": max(2, round(60 * size)), "stream": True},
        {"n": 16, "max_tokens": max(2, round(1000 * size))},
    ):
        found[await target.ask(0, "/v1/chat/completions", **asked, **members)] += 1
    return found


async def idle(target: Target, size: float) -> Counter[str]:
    """2,000 connections on which nothing is sent, beside requests."""
    async with contextlib.AsyncExitStack() as stack:
        await _open(target, round(2000 * size), stack)
        asked = [target.ask(0, "/v1/completions", prompt="hi", max_tokens=50, stream=True) for _ in range(32)]
        return Counter(await asyncio.gather(*asked))


async def stalled(target: Target, size: float) -> Counter[str]:
    """200 streams of which nothing is read, until the router has ended them."""
    async with contextlib.AsyncExitStack() as stack:
        opened = await _open(target, round(200 * size), stack, buffer_bytes=4096)
        members = {"prompt": "hi", "max_tokens": 100_000, "stream": True}
        for _, writer in opened:
            writer.write(_request("/v1/completions", members))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(45 * size)
        return Counter({"not read": len(opened)})


async def burst(target: Target, size: float) -> Counter[str]:
    """5,000 requests at once, each with a connection of its own."""
    async with contextlib.AsyncExitStack() as stack:
        opened = await _open(target, round(5000 * size), stack)
        for _, writer in opened:
            writer.write(_request("/v1/completions", {"prompt": "hi", "max_tokens": 8, "stream": True}))
        return Counter(await asyncio.gather(*[_status(reader) for reader, _ in opened]))


LOADS: dict[str, Load] = {"prompts": prompts, "choices": choices, "idle": idle, "stalled": stalled, "burst": burst}


async def _open(
    target: Target, count: int, stack: contextlib.AsyncExitStack, buffer_bytes: int = 0
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for start in range(0, count, _CONNECTS_AT_ONCE):
        numbers = range(start, min(count, start + _CONNECTS_AT_ONCE))
        opened += await asyncio.gather(*[target.connect(number, buffer_bytes) for number in numbers])
    for _, writer in opened:
        stack.callback(writer.transport.abort)
    return opened


async def _status(reader: asyncio.StreamReader) -> str:
    try:
        head = await asyncio.wait_for(reader.read(2**16), _WAIT_S)
        while await asyncio.wait_for(reader.read(2**16), _WAIT_S):
            pass
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    return head[9:12].decode() or "closed"


def measure(name: str, size: float = 1.0) -> Loaded:
    """The router under load `name`. Raises `RequestFailed`, `ChildFailed`."""
    token_id = Tokenizer.from_folder(checkpoint_path()).encode(" word")[-1]
    fingerprint = model_fingerprint(checkpoint_path(), load_config(checkpoint_path()))
    with Child("router", *_ROUTER_FLAGS, stdout=PIPE) as router:  # with the demo model's tokenizer
        ready = router.wait_ready(_READY_S)
        address = urlsplit(ready.address)
        with LoadNode(ready.control_address, fingerprint, token_id, _INTERVAL_S) as node:
            if not node.joined.wait(_READY_S):
                raise RequestFailed("the router did not take the node in")
            answers = asyncio.run(LOADS[name](Target(address.hostname or "", address.port or 0), size))
            return Loaded(name, *_lag(ready.address), _peak_rss_bytes(router.pid), dict(answers))


def _lag(base_url: str) -> tuple[float, float, float]:
    """The 99th percentile, the worst and the worst by own work, in seconds, as the router's metrics have them."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("baton:event_loop")]
    buckets = [(float(each.labels["le"]), each.value) for each in samples if each.name.endswith("_bucket")]
    p99_s = next(bound for bound, count in sorted(buckets) if count >= 0.99 * buckets[-1][1])
    value = {each.name: each.value for each in samples}
    return p99_s, value["baton:event_loop_lag_max_seconds"], value["baton:event_loop_own_lag_max_seconds"]


def _peak_rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a goal is not met."""
    parser = argparse.ArgumentParser("python -m baton.bench.limits.router_load", description=__doc__.splitlines()[0])
    parser.add_argument("loads", nargs="*", help=f"of {', '.join(LOADS)}; all when none is named")
    parser.add_argument("--size", type=float, default=1.0, help="a share of the full load")
    flags = parser.parse_args(arguments)
    found = []
    for name in flags.loads or LOADS:
        found.append(measure(name, flags.size))
        sys.stdout.write(f"{found[-1]}\n")
        sys.stdout.flush()
    return 0 if all(each.is_good for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
