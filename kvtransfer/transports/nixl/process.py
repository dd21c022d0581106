"""The node's side of an agent process: starts it, talks to it, ends it, starts it again.

Owns one child process at a time (one *life*), its socket pair and what it writes to standard error. Knows commands and
reports as messages only, and neither peers nor handoffs.

Only the first start is waited for. Whatever ends a life later, a crash or `kill`, the next one comes up in the
background: `poll` starts it and reports its `Ready`, unless it crashes too often (`lives`).

A life has ended when its process was reaped: from then on it reads and writes nothing. `num_lives_ended` counts them.

The kernel kills the process when the *thread* that started it ends (see `baton.runtime.child`), so both the thread that
constructs this and the one that polls have to live as long as the node.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from baton.kvtransfer.transports.nixl.lives import Crashes, require_nixl
from baton.kvtransfer.transports.nixl.ucx import ucx_environment
from baton.kvtransfer.transports.nixl.wire import COMMANDS, REPORTS, Channel, Ready
from baton.runtime.child import PIPE, Child, describe_end
from baton.wire.errors import InvalidSetting

_FIRST_START_S = 30.0
_REAP_S = 1.0
_RETRY_S = 1.0
_MAX_TAIL_BYTES = 4096
_MODULE = "baton.kvtransfer.transports.nixl.agent"
_log = logging.getLogger(__name__)


class AgentProcess:
    """Keeps one agent over the memory of the open file `descriptor` running. Blocks until the first is ready.

    Raises `InvalidSetting` when nixl is not installed or the agent does not start.
    """

    def __init__(self, descriptor: int, num_blocks: int, block_bytes: int, host: str) -> None:
        require_nixl()
        self.ready: Ready | None = None
        self.num_lives_ended = 0
        self._descriptor = descriptor
        self._sizes = (num_blocks, block_bytes)
        self._environment = {"NIXL_LOG_LEVEL": "WARN", **ucx_environment(host, os.environ)}
        self._crashes = Crashes()
        self._start_s = 0.0
        self._tail = b""
        self._child: Child | None = None
        self._channel: Channel | None = None
        self._is_killed = False
        self._is_ending = False
        self._is_closed = False
        self._start_if_possible()
        self._wait_until_ready()

    def wait_on(self) -> Sequence[Any]:
        """The socket that is readable when `poll` has something to do."""
        if self._child is None or self._channel is None or not self._channel.is_open:
            return ()
        return (self._channel.socket, self._child.stderr)

    @property
    def num_crashes(self) -> int:
        """The number of lives that ended by themselves."""
        return self._crashes.num_crashes

    @property
    def is_alive(self) -> bool:
        """Whether there is a process that was not reaped."""
        return self._child is not None

    @property
    def is_starting(self) -> bool:
        """Whether there is an agent that nobody knows yet."""
        return self._child is not None and self.ready is None and not self._is_ending

    @property
    def may_start(self) -> bool:
        """Whether the next life may begin: it has not crashed too often."""
        return self._crashes.may_start

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of commands that the agent has not taken."""
        return 0 if self._channel is None else self._channel.num_waiting_bytes

    def send(self, command: object) -> None:
        """Give a command to the agent; lost when there is none."""
        if self.ready is not None and self._channel is not None:
            self._channel.send(command)

    def poll(self) -> list[Any]:
        """Reports that have come, `Ready` of a new life among them. Notices the end of a life and starts the next."""
        if self._is_closed:
            return []
        if self._child is None:
            if self.may_start and time.monotonic() >= self._start_s:
                self._start_if_possible()
            return []
        reports = self._take_reports()
        if self._channel is None or not self._channel.is_open:
            self._kill_process()
        self._reap()
        return reports

    def kill(self) -> None:
        """End this life now. It has ended when `num_lives_ended` has risen, usually before this returns."""
        self._is_killed = True
        self._kill_process()
        if self._child is not None:
            self._child.wait(_REAP_S)
        self._reap()

    def close(self) -> None:
        """End the agent for good."""
        self.kill()
        self._is_closed = True

    def _start_if_possible(self) -> None:
        try:
            self._start()
        except OSError as error:
            _log.warning("the nixl agent cannot be started now: %s", error.strerror or error)
            self._tail = str(error).encode()
            self._start_s = time.monotonic() + _RETRY_S

    def _start(self) -> None:
        """Begin a life. Raises `OSError` when the system has no descriptor, process or memory for it."""
        ours, theirs = socket.socketpair()
        numbers = (theirs.fileno(), self._descriptor, *self._sizes)
        try:
            with theirs:
                self._child = Child(
                    _MODULE,
                    *map(str, numbers),
                    environment=self._environment,
                    stderr=PIPE,
                    pass_fds=(theirs.fileno(), self._descriptor),
                )
        except OSError:
            ours.close()
            raise
        os.set_blocking(self._child.stderr.fileno(), False)
        self._channel = Channel(ours, COMMANDS, REPORTS)
        self._is_killed = self._is_ending = False
        self._tail = b""

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _FIRST_START_S
        while self.ready is None and not self.num_lives_ended and time.monotonic() < deadline_s:
            select.select([*self.wait_on()], [], [], 0.1)
            self.poll()
        if self.ready is None:
            self.close()
            raise InvalidSetting(f"--kv-transport nixl: its agent did not start: {self._last_words() or 'no answer'}")

    def _take_reports(self) -> list[Any]:
        self._read_errors()
        if self._channel is None:
            return []
        self._channel.flush()
        reports = self._channel.receive()
        for report in reports:
            if isinstance(report, Ready):
                self.ready = report
        return reports

    def _read_errors(self) -> None:
        text = self._child.stderr.read(_MAX_TAIL_BYTES) if self._child is not None else b""
        if text:
            self._tail = (self._tail + text)[-_MAX_TAIL_BYTES:]
            _log.info("nixl agent: %s", text.decode(errors="replace").rstrip())

    def _last_words(self) -> str:
        return " ".join(self._tail.decode(errors="replace").split())[-600:]

    def _kill_process(self) -> None:
        self.ready, self._is_ending = None, True
        if self._child is not None:
            self._child.kill()

    def _reap(self) -> None:
        """Notice the end of the process, which is reaped with it."""
        if self._child is None or (status := self._child.poll()) is None:
            return
        self._read_errors()
        if not self._is_killed:
            self._crashes.note()
            _log.warning("the nixl agent %s: %s", describe_end(status), self._last_words())
        if self._channel is not None:
            self._channel.close()
        self._child.end()  # closes its pipe
        self._child = self._channel = self.ready = None
        self.num_lives_ended += 1
