"""What a controller asks of whatever runs the programs of a deployment: a Ray cluster, or the one that tests play.

Owns the words: a *member* is one program of a deployment under a name of its own, and its *place* is what was reserved
for it on a machine. `tests/launch/cluster/conformance.py` says what every backend has to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    """How far a member is. `EXITED`: its process has ended, and its place is still there. `LOST`: its machine, or what
    watched over it there, is gone."""

    PLACING = "placing"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a member: `python -m module *arguments` beside the variables that its machine has.

    Each of `host_flags` is given the address at which it has to listen there. `resources`: its needs of one machine. A
    member may be spread over several machines. `further` then runs on others, each on one of its own with the same
    resources, and comes and goes with the member. `wait_flag` is given a port at which the member waits for these;
    their `dial_flag` is given the member's address with that port.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    host_flags: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    further: tuple[Program, ...] = ()
    wait_flag: str = ""
    dial_flag: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a member now.

    `address` and `control_address` are those that it told when it was ready. `machine` is its machine's name, "" before
    it has a place. `reason` says why it exited or was lost, or what it waits for. `arguments` are those that its
    program was started with.
    """

    phase: Phase
    machine: str = ""
    address: str = ""
    control_address: str = ""
    reason: str = ""
    pid: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that may have members: its name, its address, and what it has in all."""

    name: str
    address: str
    resources: Mapping[str, float]


class Backend(Protocol):
    """Runs members. Each call returns within seconds, and raises `ChildFailed` when it cannot be done now."""

    def start(self, program: Program) -> None:
        """Find a place for a member if it has none, and start its program there. One that exited or was lost starts
        anew; one that runs is left alone. From now on nothing is reported of an earlier life of it."""
        ...

    def terminate(self, name: str) -> None:
        """Ask a member to finish what it has and to exit. Nothing happens if there is none."""
        ...

    def remove(self, name: str) -> None:
        """End a member at once, and free its places. Nothing happens if there is none."""
        ...

    def reports(self) -> Mapping[str, Report]:
        """All members by name, also those that an earlier controller started."""
        ...

    def machines(self) -> Sequence[Machine]:
        """The machines that are there."""
        ...
