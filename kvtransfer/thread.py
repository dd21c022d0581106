"""The transfer thread of a node: it handles messages, blocks, leases and checksums independently of the engine's steps.

Owns one thread and the `Side` that runs on it: after `start` no other thread touches the side. The engine's thread
gives it commands with `post` (see `commands`), and the side answers with notices through a `Mailbox`. Leases are
renewed and expire here, however long a step of the engine takes.

An idle thread is blocked on sockets. When the side raises, the thread ends and `failure` says why: the node must not go
on without its transfers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import zmq

from baton.kvtransfer.mailbox import Mailbox
from baton.runtime.watchdog import Beat
from baton.wire.errors import RequestFailed

MAX_IDLE_S = 0.25
_log = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)


class Side(Protocol[CommandT_contra]):
    """One end of the handoffs of a node (see `sending` and `receiving`). Times are seconds, monotonic."""

    def do(self, command: CommandT_contra, now_s: float) -> None:
        """Carry out a command of the engine's thread."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """Sockets (ZMQ or with a file descriptor) that are readable when `round` has something to do."""
        ...

    def round(self, now_s: float) -> float:
        """Work for at most a few milliseconds. Returns in how many seconds it wants to be called again."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class TransferThread(Generic[CommandT]):
    """Runs a side until it is closed. `begin` is called first, on the thread (see `KvPool.enter`); `beat` is touched in
    each turn."""

    def __init__(self, side: Side[CommandT], name: str, begin: Callable[[], None], beat: Beat | None = None) -> None:
        self.failure: Exception | None = None
        self._side = side
        self._begin = begin
        self._beat = beat
        self._commands: Mailbox[CommandT] = Mailbox()
        self._is_closing = False
        self._poller = zmq.Poller()
        self._sources: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: CommandT) -> None:
        """Queue a command for the thread, which runs commands in this order. The number of requests of a node bounds
        them.
        """
        self._commands.put(command)

    def wake(self) -> None:
        """Wake the thread, so that its side is called again."""
        self._commands.wake()

    def require_alive(self) -> None:
        """Raise `RequestFailed` when the side has failed, because no transfer would make progress any more."""
        if self.failure is not None:
            raise RequestFailed(f"the transfer thread has failed: {self.failure}") from self.failure

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current turn, and close the side."""
        self._is_closing = True
        self._commands.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._commands.close()

    def _run(self) -> None:
        try:
            self._begin()
            while not self._is_closing:
                if self._beat is not None:
                    self._beat.touch()
                self._turn()
        except Exception as error:  # no caller could catch it: the node checks `failure`
            _log.exception("the transfer thread failed")
            self.failure = error
        finally:
            if self._beat is not None:
                self._beat.rest()
            self._side.close()

    def _turn(self) -> None:
        wait_s = self._side.round(time.monotonic())
        self._wait(min(wait_s, MAX_IDLE_S))
        for command in self._commands.take():
            self._side.do(command, time.monotonic())

    def _wait(self, wait_s: float) -> None:
        sources = [self._commands.wakeup, *self._side.wait_on()]
        if sources != self._sources:
            self._poller = zmq.Poller()
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
            self._sources = sources
        # rounded up: a wait of a fraction of a millisecond must not become a spin
        self._poller.poll(-int(-wait_s * 1000 // 1))
