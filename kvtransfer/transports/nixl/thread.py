"""The node's side of an agent that runs on a thread of the node: starts it, talks to it, ends it, starts it again.

For pools on a GPU. Only the process that allocated device memory can make a CUDA IPC handle for it, and one that has
imported memory cannot hand it on: so the agent lives beside the engine, with the same loop and the same words over a
socket pair as in a process of its own (`process`), and nothing native in it is isolated from the node any more:
what crashes there ends the node.

Owns one thread at a time (one *life*). Its first act is to choose the GPU. An exception ends a life; the next one comes
up in the background, unless they crash too often (`lives`).

A thread cannot be killed, only asked. So a life has ended when its thread has come back from tearing the agent down
(`Agent.close`), and not before. One that does not come back within `END_S`, or whose teardown failed, may still read or
write the pool, and nothing that this process can do would end that: `poll` raises `TransferFailed` from then on,
whenever it is called. That ends the transfer thread, with it the node, and the end of a process is proof for everyone.
What a life that is ending still reports is not passed on.

The environment. UCX and nixl read their settings from the environment of the process: what `ucx` chooses is put
there when the first thread is about to start, names of theirs only, and none that the user set. It stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.kvtransfer.transports.nixl.agent import BESIDE_ENGINE, Agent
from baton.kvtransfer.transports.nixl.lives import Crashes, require_nixl
from baton.kvtransfer.transports.nixl.memory import VRAM, Region, region_of
from baton.kvtransfer.transports.nixl.ucx import may_use_cuda_ipc, node_environment
from baton.kvtransfer.transports.nixl.wire import COMMANDS, REPORTS, Channel, Ready
from baton.wire.errors import InvalidSetting, TransferFailed

END_S = 5.0
"""How long a teardown may take. A good one takes milliseconds, and waits for what the GPU has been given."""
_KILL_WAIT_S = 1.0
_FIRST_START_S = 30.0
_RETRY_S = 1.0
_LOOK_AGAIN_S = 0.005
_OWN_NAMES = ("UCX_", "NIXL_")
_log = logging.getLogger(__name__)

AgentMain: TypeAlias = Callable[[Channel, Region, threading.Event], None]
"""What a life does: work on the region until the channel is closed or the event is set, then release everything."""


@dataclass(slots=True)
class _Life:
    """`failure` is why its thread ended, "" when it was asked to; it is written by that thread as its last act."""

    channel: Channel
    stopped: threading.Event
    thread: threading.Thread | None = None
    failure: str = ""
    is_unproven: bool = False
    end_by_s: float | None = None


@dataclass(slots=True)
class _NotTornDown(Exception):
    """The agent's teardown failed: something of it may still be there."""

    reason: str


def run_agent(channel: Channel, region: Region, stopped: threading.Event) -> None:
    """One life of a real agent. Raises what ended it."""
    region.enter()
    agent = Agent(channel, region, BESIDE_ENGINE, stopped)
    failure = ""
    try:
        agent.run()
    except Exception as error:  # nixl's own kinds have no common root
        failure = _reason(error)
    # out here: while the error was handled, its frames held references that the teardown has to drop
    try:
        agent.close()
    except Exception as error:  # as above
        raise _NotTornDown(_reason(error)) from None
    if failure:
        raise RuntimeError(failure)


class AgentThread:
    """Keeps one agent over `pool`, [num_blocks, block_bytes] uint8, running. Blocks until the first is ready.

    Raises `InvalidSetting` when nixl is not installed or the agent does not start. The pool lives as long as this.
    """

    def __init__(self, pool: Any, host: str, main: AgentMain = run_agent) -> None:
        require_nixl()
        self.region = region_of(pool)
        self.ready: Ready | None = None
        self.num_lives_ended = 0
        self._pool = pool
        self._main = main
        self._crashes = Crashes()
        self._life: _Life | None = None
        self._is_killed = False
        self._is_closed = False
        self._start_s = 0.0
        self._last_failure = ""
        _put_into_environment(host, has_gpu=self.region.kind == VRAM)
        if may_use_cuda_ipc(os.environ):
            self.region.require_shareable()
        self._start_if_possible()
        self._wait_until_ready()

    def wait_on(self) -> Sequence[Any]:
        """The socket that is readable when `poll` has something to do."""
        return (self._life.channel.socket,) if self._life is not None and self._life.channel.is_open else ()

    @property
    def num_crashes(self) -> int:
        """The number of lives that ended by themselves."""
        return self._crashes.num_crashes

    @property
    def is_alive(self) -> bool:
        """Whether there is a thread that has not come back."""
        return self._life is not None

    @property
    def is_starting(self) -> bool:
        """Whether there is an agent that nobody knows yet."""
        return self._life is not None and self.ready is None and self._life.end_by_s is None

    @property
    def may_start(self) -> bool:
        """Whether the next life may begin: it has not crashed too often."""
        return self._crashes.may_start

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of commands that the agent has not taken."""
        return 0 if self._life is None else self._life.channel.num_waiting_bytes

    def send(self, command: object) -> None:
        """Give a command to the agent; lost when there is none."""
        if self.ready is not None and self._life is not None:
            self._life.channel.send(command)

    def poll(self) -> list[Any]:
        """Reports that have come, `Ready` of a new life among them. Notices the end of a life and starts the next.

        Raises `TransferFailed` when a life cannot be ended: the node must not go on.
        """
        if self._is_closed:
            return []
        if self._life is None:
            if self.may_start and time.monotonic() >= self._start_s:
                self._start_if_possible()
            return []
        reports = self._take_reports(self._life)
        if not self._life.channel.is_open:
            self._ask_to_end(self._life)
        self._notice_end()
        self._require_end()
        return reports

    def kill(self) -> None:
        """End this life now. It has ended when `num_lives_ended` has risen, usually before this returns."""
        if self._life is None or self._life.end_by_s is not None:
            return
        self._is_killed = True
        self._ask_to_end(self._life)
        self._wait_for_end(_KILL_WAIT_S)

    def _wait_for_end(self, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while self._life is not None and not self._life.is_unproven and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)
            self._notice_end()

    def close(self) -> None:
        """End the agent for good. A thread that does not come back ends with the process. That can crash it, so the
        thread is waited for up to `END_S` seconds."""
        self.kill()
        self._wait_for_end(END_S)
        self._is_closed = True
        if self._life is not None:
            _log.warning("the nixl agent of this node does not end; it goes with the process")
            self._life.channel.close()

    def _start_if_possible(self) -> None:
        try:
            self._start()
        except (OSError, RuntimeError) as error:  # of a thread that cannot be started
            _log.warning("the nixl agent cannot be started now: %s", error)
            self._last_failure = str(error)
            self._start_s = time.monotonic() + _RETRY_S

    def _start(self) -> None:
        """Begin a life. Raises `OSError` and `RuntimeError` when the system has no descriptor or thread for it."""
        ours, theirs = socket.socketpair()
        life = _Life(Channel(ours, COMMANDS, REPORTS), threading.Event())
        life.thread = threading.Thread(target=self._live, args=(life, theirs), name="kv-nixl", daemon=True)
        try:
            life.thread.start()
        except RuntimeError:
            theirs.close()
            life.channel.close()
            raise
        self._life = life
        self._is_killed = False

    def _live(self, life: _Life, end: socket.socket) -> None:
        """The thread."""
        channel = Channel(end, REPORTS, COMMANDS)
        try:
            self._main(channel, self.region, life.stopped)
        except _NotTornDown as error:
            life.failure, life.is_unproven = error.reason, True
        except Exception as error:  # the edge of the thread
            life.failure = _reason(error)
        finally:
            channel.close()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _FIRST_START_S
        while self.ready is None and not self.num_lives_ended and time.monotonic() < deadline_s:
            select.select([*self.wait_on()], [], [], 0.1)
            with contextlib.suppress(TransferFailed):  # said below
                self.poll()
        if self.ready is None:
            self.close()
            raise InvalidSetting(
                f"--kv-transport nixl: its agent did not start: {self._last_failure or 'no answer'}{self._advice}"
            )

    @property
    def _advice(self) -> str:
        if self.region.kind != VRAM:
            return ""
        return (
            "; memory of a GPU needs the nixl package of the driver's CUDA (nixl-cu12 or nixl-cu13), and a UCX_TLS "
            "that is set must let cuda_copy through"
        )

    def _take_reports(self, life: _Life) -> list[Any]:
        life.channel.flush()
        reports = life.channel.receive()
        if life.end_by_s is not None:
            return []  # nobody knows this agent any more
        for report in reports:
            if isinstance(report, Ready):
                self.ready = report
        return reports

    def _ask_to_end(self, life: _Life) -> None:
        if life.end_by_s is None:
            self.ready, life.end_by_s = None, time.monotonic() + END_S
            life.stopped.set()
            with contextlib.suppress(OSError):  # wakes it up; its end may be closed already
                life.channel.socket.shutdown(socket.SHUT_WR)

    def _notice_end(self) -> None:
        life = self._life
        if life is None or life.thread is None or life.thread.is_alive() or life.is_unproven:
            return
        if not self._is_killed:
            self._crashes.note()
            self._last_failure = life.failure
            _log.warning("the nixl agent ended: %s", life.failure or "it was not asked to")
        life.channel.close()
        self._life = self.ready = None
        self.num_lives_ended += 1

    def _require_end(self) -> None:
        life = self._life
        if life is None or life.end_by_s is None:
            return
        if life.is_unproven:
            self._last_failure = life.failure
            raise TransferFailed(f"the nixl agent of this node could not be torn down ({life.failure})")
        if time.monotonic() > life.end_by_s:
            raise TransferFailed(f"the nixl agent of this node did not end within {END_S:g} s")


def _put_into_environment(host: str, *, has_gpu: bool) -> None:
    chosen = {"NIXL_LOG_LEVEL": "WARN", **node_environment(host, os.environ, has_gpu=has_gpu)}
    for name, value in chosen.items():
        if name.startswith(_OWN_NAMES):
            os.environ.setdefault(name, value)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:1000]
