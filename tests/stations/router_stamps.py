"""Makes a router stamp each token that comes from a node, is taken by the answer it belongs to, and has been written.

Beside that each turn of the loop's lag timer is stamped, and a thread looks where the loop stands when it has not
turned for `STANDS_S`: a line in `FILE.stalls` for each look, with the state of its thread and what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from unittest import mock

from baton.router.health.loop_lag import LoopLag
from baton.router.http.openai.answer import Answer, Piece
from baton.router.http.serving.body_writer import BodyWriter
from baton.router.requests.relay import Relay
from baton.wire.messages.output import Tokens
from tests.stations.ring import Ring, Station, handoff_key, request_key

STANDS_S = 0.15
_LOOK_S = 0.05
_MAX_LINES = 2_000
_SHOWN_FRAMES = 6


@contextlib.contextmanager
def stamped(path: Path) -> Iterator[None]:
    """While this lasts, a router of this process stamps into the file `path`. Its loop runs on this thread."""
    stamps = _Stamps(Ring(path))
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (Relay, "on_tokens", stamps.received(Relay.on_tokens)),
            (Answer, "take", stamps.taken(Answer.take)),
            (BodyWriter, "write", stamps.written(BodyWriter.write)),
            (BodyWriter, "finish", stamps.written(BodyWriter.finish)),
            (LoopLag, "_sample", stamps.turned(LoopLag._sample)),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        looker = _StallLog(path.with_suffix(".stalls"), stamps)
        stack.callback(looker.close)
        yield


class _Stamps:
    """Wraps what a token passes. `turned_s`: when the loop last ran its timer, 0.0 before it has."""

    def __init__(self, ring: Ring) -> None:
        self.turned_s = 0.0
        self._ring = ring
        self._taken: ContextVar[list[tuple[int, int, int]]] = ContextVar("taken")

    def received(self, on_tokens: Callable[[Relay, Tokens], None]) -> Callable[[Relay, Tokens], None]:
        def stamp(relay: Relay, tokens: Tokens) -> None:
            for event in tokens.events:
                if (flight := relay._flights.get(event.handoff_id)) is not None:
                    request, last = request_key(flight.trace.request_id), event.index + len(event.token_ids) - 1
                    handoff = handoff_key(event.handoff_id)
                    self._ring.add(Station.RECEIVED, request, handoff, flight._index, last)
            on_tokens(relay, tokens)

        return stamp

    def taken(self, take: Callable[[Answer], Awaitable[list[Piece]]]) -> Callable[[Answer], Awaitable[list[Piece]]]:
        async def stamp(answer: Answer) -> list[Piece]:
            pieces = await take(answer)
            tokens = [
                (request_key(choice.flight.trace.request_id), choice.index, num_tokens - 1)
                for choice, _, num_tokens in pieces
                if choice.flight is not None and num_tokens
            ]
            self._taken.set(tokens)
            for request, choice, last in tokens:
                self._ring.add(Station.TAKEN, request, 0, choice, last)
            return pieces

        return stamp

    def written(self, write: Callable[[BodyWriter, bytes], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def stamp(writer: BodyWriter, piece: bytes) -> None:
            await write(writer, piece)
            for request, choice, last in self._taken.get([]):
                self._ring.add(Station.WRITTEN, request, 0, choice, last)

        return stamp

    def turned(self, sample: Callable[..., None]) -> Callable[..., None]:
        def stamp(lag: LoopLag, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
            self.turned_s = time.monotonic()
            self._ring.add(Station.TURN)
            sample(lag, loop, due_s)

        return stamp


class _StallLog:
    """A thread that writes down where the thread that made this is, while the loop does not turn."""

    def __init__(self, path: Path, stamps: _Stamps) -> None:
        self._path, self._stamps = path, stamps
        path.unlink(missing_ok=True)
        self._ident, self._task = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stalls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join(1.0)

    def _look(self) -> None:
        num_left = _MAX_LINES
        while num_left and not self._is_over.wait(_LOOK_S):
            stood_s = time.monotonic() - self._stamps.turned_s
            if self._stamps.turned_s and stood_s > STANDS_S:
                num_left -= 1
                with contextlib.suppress(OSError), self._path.open("a") as file:
                    file.write(f"{time.monotonic():.3f} {stood_s:.3f} {self._state()} {self._frames()}\n")

    def _state(self) -> str:
        """Of the thread: R runs or waits for a processor, S sleeps, D waits for a disk; and in which system call."""
        state = (self._task / "stat").read_text().rpartition(")")[2].split()[0]
        return f"{state} {(self._task / 'wchan').read_text() or '-'}"

    def _frames(self) -> str:
        stack = traceback.extract_stack(sys._current_frames()[self._ident])[-_SHOWN_FRAMES:]
        return " > ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack)
