"""What others see of a router while something is done to it: `/health` from new connections, and the gaps of streams.

Runs as a process of its own, so that whatever a test does to the router delays no look at it:

    python -m tests.router.bystanders HOST PORT MODEL

It looks until its standard input ends, and then writes what it saw as JSON. Each look at `/health` begins on time,
whatever became of the one before: a look that is late delays no other one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from tests.router.http_client import Connection, parse_reply, request_bytes

LOOK_S = 0.05
PATIENCE_S = 60.0
NUM_STREAMS = 4
_MAX_TOKENS = 100_000


@dataclass(slots=True)
class Seen:
    """Seconds, in the order in which they were seen. `num_failed`: looks at `/health` without an answer of 200."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def __str__(self) -> str:
        return f"/health {_told(self.health_s)}, {self.num_failed} failed; gap of streams {_told(self.gaps_s)}"


@asynccontextmanager
async def watching(host: str, port: int, model: str) -> AsyncIterator[Seen]:
    """Others look at the router meanwhile; what they saw is there when it ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, host, str(port), model,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    seen = Seen()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await process.stdout.readline()
        yield seen
        told, _ = await asyncio.wait_for(process.communicate(b""), PATIENCE_S)
        for name, value in json.loads(told).items():
            setattr(seen, name, value)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _look(host: str, port: int, seen: Seen) -> None:
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            connection = Connection(*await asyncio.open_connection(host, port))
            await connection.send(request_bytes("GET", "/health"))
            seen.num_failed += parse_reply(await connection.to_end()).status != 200
            connection.break_off()
    except (OSError, TimeoutError):
        seen.num_failed += 1
    seen.health_s.append(time.monotonic() - begun_s)


async def _keep_looking(host: str, port: int, seen: Seen, until: asyncio.Task[str]) -> None:
    async with asyncio.TaskGroup() as group:
        while not until.done():
            group.create_task(_look(host, port, seen))
            await asyncio.sleep(LOOK_S)


async def _read(host: str, port: int, model: str, seen: Seen, has_begun: asyncio.Event) -> None:
    body = {"model": model, "prompt": "word " * 4, "stream": True, "max_tokens": _MAX_TOKENS}
    connection = Connection(*await asyncio.open_connection(host, port))
    await connection.send(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
    arrivals_s: list[float] = []
    while data := await connection.reader.read(65536):
        arrivals_s += [time.monotonic()] * (b"data: " in data)
        seen.gaps_s += [later - earlier for earlier, later in pairwise(arrivals_s[-2:])]
        has_begun.set()


async def _main(arguments: Sequence[str]) -> None:
    host, port, model = arguments[0], int(arguments[1]), arguments[2]
    seen = Seen()
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(_read(host, port, model, seen, each)) for each in begun]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(each.wait() for each in begun))
    _write("looking")
    await _keep_looking(host, port, seen, asyncio.create_task(asyncio.to_thread(sys.stdin.read)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    _write(json.dumps(asdict(seen)))


def _told(values_s: Sequence[float]) -> str:
    ordered = sorted(values_s) or [0.0]
    middle, late, worst = (ordered[int(share * (len(ordered) - 1))] * 1000 for share in (0.5, 0.99, 1.0))
    return f"p50 {middle:.0f} ms, p99 {late:.0f} ms, worst {worst:.0f} ms of {len(values_s)}"


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
