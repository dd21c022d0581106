"""Helper: a router as a process of its own, with one fake node."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from engine.models.config import load_config
from engine.models.identity import model_fingerprint
from tests.router.fake_node import Context, FakeNode, make_hello
from tests.router.http_client import Connection, parse_reply, request_bytes
from wire.messages import DECODE

ROOT = Path(__file__).resolve().parents[2]
COMPLETION = {"prompt": "The quick brown fox", "stream": True}


@dataclass(slots=True)
class RouterProcess:
    """A router that has said that it is ready."""

    process: asyncio.subprocess.Process
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


@asynccontextmanager
async def router_process(
    checkpoint: Path, *flags: str, fds: Sequence[int] = (), **changes: Any
) -> AsyncIterator[RouterProcess]:
    """A router and a decode node; `changes`: of its Hello."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", str(checkpoint), "--port=0", "--control-port=0", *flags,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, pass_fds=fds,
    )  # fmt: skip
    context: Context = zmq.Context()
    node: FakeNode | None = None
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            ready = json.loads(await process.stdout.readline())
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
