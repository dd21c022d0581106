"""Helper: a backend without processes, that a test moves on by hand. It passes the conformance suite of backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from baton.launch.cluster.backend import Backend, Machine, Phase, Program, Report
from baton.wire.errors import ChildFailed
from tests.launch.cluster.conformance import MODULE

NUM_CPUS = 8.0
ADDRESS = "10.0.0.1"


@dataclass
class Played:
    """One member. `looks`: how often it was looked at since it was started; it is ready at the second time."""

    program: Program
    report: Report
    behaviour: str
    looks: int = 0


@dataclass
class World:
    """What outlives a controller: members by name, machines, and what was done in order."""

    members: dict[str, Played] = field(default_factory=dict)
    behaviours: dict[str, str] = field(default_factory=dict)
    """Of members by name, in the place of "steady"; "unstartable" makes `start` raise."""
    log: list[str] = field(default_factory=list)
    num_cpus: float = NUM_CPUS
    is_away: bool = False
    """Whatever runs the members does not answer. They go on."""
    pids: count[int] = field(default_factory=lambda: count(100))


class FakeBackend:
    """See the module and `baton.launch.cluster.backend.Backend`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, program: Program) -> None:
        behaviour = program.arguments[0] if program.module == MODULE else "steady"
        behaviour = self.world.behaviours.get(program.name, behaviour)
        if behaviour == "unstartable":
            raise ChildFailed("Ray does not answer")
        known = self.world.members.get(program.name)
        if known is None or known.report.phase in (Phase.EXITED, Phase.LOST):
            self.world.log.append(f"start {program.name}")
            self.world.members[program.name] = Played(program, Report(Phase.PLACING), behaviour)

    def terminate(self, name: str) -> None:
        member = self.world.members.get(name)
        if member is None:
            return
        self.world.log.append(f"terminate {name}")
        if member.behaviour == "stubborn":
            member.report = replace(member.report, phase=Phase.STOPPING)
        else:
            self.end(name, Phase.EXITED, "exited with status 0")

    def remove(self, name: str) -> None:
        if self.world.members.pop(name, None) is not None:
            self.world.log.append(f"remove {name}")

    def reports(self) -> Mapping[str, Report]:
        if self.world.is_away:
            raise ChildFailed("Ray does not answer")
        for member in self.world.members.values():
            member.looks += 1
            if member.report.phase == Phase.PLACING:
                self._place(member)
            elif member.report.phase == Phase.STARTING and member.behaviour != "mute":
                member.report = self._ready(member)
        return {name: member.report for name, member in self.world.members.items()}

    def machines(self) -> Sequence[Machine]:
        return (Machine("machine-1", ADDRESS, {"CPU": self.world.num_cpus}),)

    def end(self, name: str, phase: Phase, reason: str) -> None:
        """What becomes of a member that dies, or whose machine does."""
        member = self.world.members[name]
        member.report = Report(phase, member.report.machine, reason=reason, arguments=member.program.arguments)

    def _place(self, member: Played) -> None:
        needs = member.program.resources["CPU"]
        others = [each for each in self.world.members.values() if each is not member and each.report.machine]
        taken = sum(each.program.resources["CPU"] for each in others)
        if needs + taken > self.world.num_cpus:
            member.report = Report(Phase.PLACING, reason=f"waits for {needs:g} CPU of a machine")
        elif member.behaviour == "broken":
            member.report = Report(Phase.EXITED, "machine-1", reason="no such model: llama-17")
        else:
            member.report = Report(Phase.STARTING, "machine-1", pid=next(self.world.pids))

    def _ready(self, member: Played) -> Report:
        if member.program.module == MODULE:
            address, control = f"http://{ADDRESS}:{member.report.pid}", "tcp://127.0.0.1:1"
        else:
            flags = dict(flag.split("=", 1) for flag in member.program.arguments if "=" in flag)
            address = f"http://{ADDRESS}:{flags.get('--port', '8000')}"
            control = f"tcp://{ADDRESS}:{flags.get('--control-port', '8001')}"
        return replace(
            member.report,
            phase=Phase.READY,
            address=address,
            control_address=control,
            arguments=member.program.arguments,
        )


@dataclass
class FakeRig:
    """The rig of the conformance suite over it."""

    backend: Backend
    world: World
    address: str = ADDRESS

    def kill(self, name: str) -> None:
        FakeBackend(self.world).end(name, Phase.EXITED, "was killed by SIGKILL")

    def lose(self, name: str) -> None:
        FakeBackend(self.world).end(name, Phase.LOST, "its machine is gone")

    def reopen(self) -> Backend:
        return FakeBackend(self.world)

    def is_running(self, pid: int) -> bool:
        return any(member.report.pid == pid for member in self.world.members.values())

    def pause(self, seconds: float) -> None:
        pass
