"""Where the other ranks of an engine come from: processes of this machine here, and of several in
`baton.ranks.machines.remote_machines`.

Owns the contract with `baton.ranks.executor.ranks`, and the processes of this machine. They are tied to the thread
that starts them and die with it (`baton.runtime.child`), so a driver that is killed leaves none behind.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from baton.device.base import DeviceFailed
from baton.engine.settings import EngineSettings
from baton.ranks.executor.spread import Machine
from baton.runtime.child import Child, describe_end, is_stopped
from baton.wire.errors import InvalidSetting

RANK_MODULE = "baton.ranks"
HERE = Machine()
STOPPED = "is stopped"


class RankFailed(DeviceFailed):
    """A rank has ended; the message says which, and why. Nothing can be computed any more."""


class StartedRank(Protocol):
    """A process of a rank as the driver sees it. `end_of_orders`: the driver's end of its channel, which closes when
    the process ends. `pid`: 0 on another machine."""

    end_of_orders: socket.socket
    machine: Machine
    pid: int

    @property
    def standing(self) -> str:
        """How the rank stands still ("is stopped"), as far as anybody tells; "" for one that seems to run."""
        ...

    def transfer_ends(self) -> tuple[tuple[socket.socket, socket.socket], Sequence[socket.socket]]:
        """The driver's ends of two lines, by which the rank is told what to receive and what to send. Then the rank's
        ends, where these have to be sent to it."""
        ...

    def kill(self) -> None:
        """Kill the rank; returns at once."""
        ...

    def wait(self, timeout_s: float) -> str:
        """How the rank has ended, for a message; "" when it has not within `timeout_s` seconds."""
        ...

    def end(self) -> None:
        """Kill the rank, and wait until nothing of it is left. The wait is bounded."""
        ...


class RankStarter(Protocol):
    """Starts ranks. `here`: this machine."""

    here: Machine

    def start(self, settings: EngineSettings) -> Sequence[StartedRank]:
        """All ranks of `settings` but the driver, in the order of their numbers. Raises `RankFailed` when that cannot
        be, and `InvalidSetting`; what was started is ended then."""
        ...


class LocalRanks:
    """Starts ranks as processes of this machine. `module`: their program where they have pools of their own."""

    def __init__(self, module: str = RANK_MODULE, here: Machine = HERE) -> None:
        self.here = here
        self._module = module

    def start(self, settings: EngineSettings) -> Sequence[LocalRank]:
        """Start all ranks but the driver. Raises `InvalidSetting` where they should be on several machines."""
        if settings.rank_machines > 1:
            raise InvalidSetting("--rank-machines: only nodes have ranks on several machines")
        return self.start_some(settings, settings.num_ranks - 1)

    def start_some(self, settings: EngineSettings, count: int) -> list[LocalRank]:
        """The first `count` of them. Raises as `start`."""
        started: list[LocalRank] = []
        try:
            for _ in range(count):
                started.append(LocalRank(self._module, self.here))
        except OSError as error:
            for rank in started:
                rank.end_of_orders.close()
                rank.end()
            number = len(started) + 1
            raise RankFailed(f"rank {number} of {settings.num_ranks} could not be started: {error}") from None
        return started


class LocalRank:
    """A rank that runs `module` in a process of this machine. Raises `OSError` when it cannot be started."""

    def __init__(self, module: str, machine: Machine) -> None:
        self.machine = machine
        self.end_of_orders, theirs = socket.socketpair()
        with theirs:
            try:
                self._child = Child(module, str(theirs.fileno()), pass_fds=(theirs.fileno(),))
            except OSError:
                self.end_of_orders.close()
                raise
        self.pid = self._child.pid

    @property
    def standing(self) -> str:
        """Why the rank stands still, for a message; "" when it does not."""
        return STOPPED if is_stopped(self.pid) else ""

    def transfer_ends(self) -> tuple[tuple[socket.socket, socket.socket], Sequence[socket.socket]]:
        (receiving, its_receiving), (sending, its_sending) = socket.socketpair(), socket.socketpair()
        return (receiving, sending), (its_receiving, its_sending)

    def kill(self) -> None:
        self._child.kill()

    def wait(self, timeout_s: float) -> str:
        status = self._child.wait(timeout_s)
        return "" if status is None else describe_end(status)

    def end(self) -> None:
        self._child.end()
