"""What `baton cluster status` shows: a deployment as its controller sees it, as a value, as JSON, and as text."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.launch.cluster.backend import Machine
from baton.wire.keys import ROUTER


@dataclass(frozen=True, slots=True)
class Note:
    """Something that changed, and why. `at_s`: seconds since 1970."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One program. `is_leaving`: it was asked to finish and goes away. `num_failures`: its ends in a row."""

    name: str
    role: str
    phase: str
    machine: str
    address: str
    pid: int
    is_leaving: bool
    num_failures: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """How many nodes a group should have, has, and has ready; how far it is from its goal (1: at it), and why."""

    desired: int
    minimum: int
    maximum: int
    running: int
    ready: int
    pressure: float
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """A deployment. `addresses`: of its routers, those that are there. `num_errors`: rounds of the controller that
    failed; `problem`: what keeps it from judging loads now, "" when nothing does."""

    name: str
    addresses: Sequence[str]
    is_stopping: bool
    is_over: bool
    groups: Mapping[str, GroupStatus]
    members: Sequence[MemberStatus]
    machines: Sequence[Machine]
    changes: Sequence[Note]
    num_errors: int = 0
    problem: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether everything that should run does."""
        routers = [member for member in self.members if member.role == ROUTER]
        has_routers = bool(routers) and all(router.phase == "ready" for router in routers)
        return has_routers and all(group.ready == group.desired for group in self.groups.values())

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps({**dataclasses.asdict(self), "is_ready": self.is_ready}, indent=2)

    def as_text(self, num_changes: int = 10) -> str:
        """Lines for a person."""
        state = "stopping" if self.is_stopping else "ready" if self.is_ready else "not ready"
        lines = [f"{self.name} is {state}" + (f", at {' and '.join(self.addresses)}" if self.addresses else "")]
        for role, group in self.groups.items():
            bounds = "" if group.minimum == group.maximum else f", from {group.minimum} to {group.maximum}"
            pressure = f"; pressure {group.pressure:.2f}: {group.reason}" if group.reason else ""
            lines.append(f"{role}: {group.ready} ready, {group.running} running of {group.desired}{bounds}{pressure}")
        lines += ["", *_table([("NAME", "STATE", "MACHINE", "ADDRESS", "WHY"), *map(_row, self.members)])]
        lines += ["", "machines:"]
        lines += [f"  {machine.name}  {machine.address}  {_amounts(machine.resources)}" for machine in self.machines]
        if self.problem:
            lines += ["", f"loads cannot be judged: {self.problem}"]
        lines += ["", "last changes:", *(f"  {shown(note)}" for note in self.changes[-num_changes:])]
        return "\n".join(lines)


def shown(note: Note) -> str:
    """A change of the deployment as one line."""
    return f"{time.strftime('%H:%M:%S', time.localtime(note.at_s))}  {note.text}"


def _row(member: MemberStatus) -> tuple[str, ...]:
    phase = f"{member.phase}, leaving" if member.is_leaving else member.phase
    if member.num_failures:
        phase += f" ({member.num_failures} ends in a row)"
    return (member.name, phase, member.machine or "-", member.address or "-", member.reason)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
