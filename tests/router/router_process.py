"""Helper: a router as a process of its own, with one fake node. It is started as users do, or forked from a process
that has done the imports (`tests.system.prepared`), which saves a second of processor time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq

from baton.engine.models.config import load_config
from baton.engine.models.identity import model_fingerprint
from baton.wire.messages.membership import DECODE
from tests.router.fake_node import Context, FakeNode, make_hello
from tests.router.http_client import Connection, parse_reply, request_bytes
from tests.system.prepared import ROUTER_MODULES, PreparedProcess, prepared_python

ROOT = Path(__file__).resolve().parents[2]
COMPLETION = {"prompt": "The quick brown fox", "stream": True}


_LOOK_S = 0.01


class Process(Protocol):
    """As much of `asyncio.subprocess.Process` as is used here."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    def kill(self) -> None: ...

    async def wait(self) -> int: ...


class _Forked:
    """A `Process`, and what it writes to stdout."""

    def __init__(self, process: PreparedProcess, out: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._out = out

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send_signal(self, signal: int) -> None:
        self._process.send_signal(signal)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        while (status := self._process.poll()) is None:  # noqa: ASYNC110  # nothing tells when a process ends
            await asyncio.sleep(_LOOK_S)
        return status

    async def first_line(self) -> str:
        """The first line of its output. Raises `ValueError` when it has ended without one."""
        while "\n" not in (written := self._out.read_text()):
            if self.returncode is not None:
                raise ValueError("the router has ended")
            await asyncio.sleep(_LOOK_S)
        return written.partition("\n")[0]


@dataclass(slots=True)
class RouterProcess:
    """A router that has said that it is ready."""

    process: Process
    ready: dict[str, Any]
    node: FakeNode
    name: str

    async def request(self, last_event_id: str = "", **members: Any) -> Connection:
        """A connection on which a completion has been asked for."""
        body = json.dumps({"model": self.name, **COMPLETION, **members}).encode()
        return await self._send(request_bytes("POST", "/v1/completions", body, {"last-event-id": last_event_id}))

    async def stop(self) -> None:
        """Send SIGTERM and wait until it takes no more requests."""
        self.process.send_signal(signal.SIGTERM)
        await self.is_not_ready()

    async def is_not_ready(self) -> None:
        """Wait until it takes no requests, or has noticed that its node is lost."""
        async with asyncio.timeout(60):
            while await self._health() != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _health(self) -> int:
        connection = await self._send(request_bytes("GET", "/health"))
        status = parse_reply(await connection.to_end()).status
        connection.break_off()
        return status

    async def models(self, api_key: str) -> int:
        """The status of a request with that key."""
        headers = {"authorization": f"Bearer {api_key}"}
        connection = await self._send(request_bytes("GET", "/v1/models", headers=headers))
        status = parse_reply(await connection.to_end()).status
        connection.break_off()
        return status

    async def _send(self, request: bytes) -> Connection:
        host, _, port = self.ready["address"].removeprefix("http://").rpartition(":")
        connection = Connection(*await asyncio.open_connection(host, int(port)))
        await connection.send(request)
        return connection

    async def ended(self, within_s: float) -> int:
        """Wait for its end; the exit status."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()


def run_router(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A forked router to its end, which has to come by itself."""
    with tempfile.TemporaryDirectory() as folder:
        process, out = _fork(Path(folder), *arguments)
        status = process.wait(120)
        return subprocess.CompletedProcess(arguments, status, out.read_text(), out.with_suffix(".err").read_text())


def _fork(folder: Path, *arguments: str) -> tuple[PreparedProcess, Path]:
    """A router, and the file of its output."""
    path = folder / "router.out"
    with path.open("wb") as out, path.with_suffix(".err").open("wb") as err:
        return prepared_python(*ROUTER_MODULES).start(["-m", "baton.router", *arguments], os.environ, out, err), path


@asynccontextmanager
async def forked_router(checkpoint: Path, *flags: str) -> AsyncIterator[RouterProcess]:
    """As `router_process`."""
    with tempfile.TemporaryDirectory() as folder:
        process = _Forked(*_fork(Path(folder), str(checkpoint), "--port=0", "--control-port=0", *flags))
        async with _with_node(process, process.first_line(), checkpoint) as router:
            yield router


@asynccontextmanager
async def router_process(
    checkpoint: Path, *flags: str, fds: Sequence[int] = (), **changes: Any
) -> AsyncIterator[RouterProcess]:
    """A router and a decode node; `changes`: of its Hello."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton.router", str(checkpoint), "--port=0", "--control-port=0", *flags,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, pass_fds=fds,
    )  # fmt: skip
    assert process.stdout is not None
    async with _with_node(process, process.stdout.readline(), checkpoint, **changes) as router:
        yield router


@asynccontextmanager
async def _with_node(
    process: Process, first_line: Awaitable[str | bytes], checkpoint: Path, **changes: Any
) -> AsyncIterator[RouterProcess]:
    context: Context = zmq.Context()
    node: FakeNode | None = None
    try:
        async with asyncio.timeout(60):
            ready = json.loads(await first_line)
        fingerprint = model_fingerprint(checkpoint, load_config(checkpoint))
        node = FakeNode(context, ready["control_address"], make_hello(DECODE, fingerprint=fingerprint, **changes))
        await node.join()
        yield RouterProcess(process, ready, node, str(checkpoint))
    finally:
        if node is not None:
            node.die()
        context.destroy(linger=0)
        if process.returncode is None:
            process.kill()
        await process.wait()
