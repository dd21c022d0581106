"""A TCP proxy between two programs, whose link can be cut, delayed, throttled, lossy, a black hole, and can lie.

Owns its listening port and the connections through it. Knows nothing of what passes. A packet that is lost is what a
program sees of it through TCP: it comes when it is sent again, and what follows waits for it. What a black hole
swallows is held in the same way until its end. Bytes are never lost within a connection, nor reordered. A link that
lies does what TCP's checksum would mostly notice and a third party could do: it turns a bit of a chunk, or says again
what it has said before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass, field

_CHUNK_BYTES = 65536
_MAX_CHUNKS = 64
_TICK_S = 0.02
_REMEMBERED = 8
_REPEAT_S = 0.2
"""After so long Linux sends again what is not acknowledged, and then after twice as long each time."""
UP, DOWN = "up", "down"
"""From the program that dials, and to it."""


@dataclass(slots=True)
class LinkState:
    """How a link is now. `held`: directions in which nothing passes. `bytes_per_s`: 0 is without limit. `loss`: which
    share of all chunks is lost, once or several times. `jitter_s`: each chunk comes later by up to so much. `flips`:
    in which share a bit is turned; `replays`: behind which share one of the last few comes again."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0
    flips: float = 0.0
    replays: float = 0.0
    held: set[str] = field(default_factory=set)
    is_cut: bool = False


class LinkProxy:
    """Listens on `port` and passes everything on to `target_port` of this machine. Lives on one event loop. `seed` says
    which packets are lost."""

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.target_port = target_port
        self._rng = random.Random(seed)
        self.state = LinkState()
        self.num_connections = 0
        self.num_lies = 0
        self.num_bytes = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the proxy does not listen")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        """End all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def reset(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def heal(self) -> None:
        """The link is well again; connections that are left go on."""
        self.state = LinkState()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.state.is_cut:
            writer.transport.abort()
            return
        try:
            onward = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, onward[1]}
        self._writers |= pair
        pumps = [self._pump(reader, onward[1], UP), self._pump(onward[0], writer, DOWN)]
        tasks = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # one direction has ended, so the connection is over for both: ZMQ does not half-close
            self._writers -= pair
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        passing = asyncio.ensure_future(self._pass_on(chunks, writer, direction))
        try:
            with contextlib.suppress(OSError):
                while not passing.done() and (chunk := await reader.read(_CHUNK_BYTES)):
                    await chunks.put((time.monotonic(), chunk))
            await chunks.put((time.monotonic(), b""))
            await passing
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)

    async def _pass_on(
        self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: str
    ) -> None:
        earlier: deque[bytes] = deque(maxlen=_REMEMBERED)
        while True:
            came_s, chunk = await chunks.get()
            while (wait_s := self._wait_s(direction, came_s)) > 0:  # noqa: ASYNC110  # looked at again: links change
                await asyncio.sleep(wait_s)
            if not chunk:
                return
            await asyncio.sleep(self._late_s())
            await self._carry(len(chunk))
            try:
                writer.write(self._told(chunk, earlier))
                await writer.drain()
            except OSError:
                return
            self.num_bytes += len(chunk)

    async def _carry(self, num_bytes: float) -> None:
        """Wait as long as a throttled link takes for so many bytes, and no longer than it is throttled."""
        while num_bytes > 0 and (bytes_per_s := self.state.bytes_per_s):  # looked at again: links change
            await asyncio.sleep(min(_TICK_S, num_bytes / bytes_per_s))
            num_bytes -= _TICK_S * bytes_per_s

    def _told(self, chunk: bytes, earlier: deque[bytes]) -> bytes:
        """What is passed on in place of a chunk, mostly itself."""
        earlier.append(chunk)
        if self._rng.random() < self.state.flips:
            self.num_lies += 1
            place = self._rng.randrange(len(chunk))
            return chunk[:place] + bytes([chunk[place] ^ 1 << self._rng.randrange(8)]) + chunk[place + 1 :]
        if self._rng.random() < self.state.replays:
            self.num_lies += 1
            return chunk + self._rng.choice(earlier)
        return chunk

    def _late_s(self) -> float:
        """How much later the next chunk comes because it was lost, and by jitter."""
        late_s, repeat_s = self._rng.uniform(0, self.state.jitter_s), _REPEAT_S
        while self._rng.random() < self.state.loss:
            late_s, repeat_s = late_s + repeat_s, 2 * repeat_s
        return late_s

    def _wait_s(self, direction: str, came_s: float) -> float:
        if direction in self.state.held:
            return _TICK_S
        return min(_TICK_S, came_s + self.state.delay_s - time.monotonic())
