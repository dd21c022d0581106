"""Keeps a deployment as it should be: starts what is missing, starts again what dies, drains what is too much, and
changes how much is wanted when the policy says so.

Owns the desired state and every decision about members. Does not know what runs them (`baton.launch.cluster.backend`),
nor what loads mean (`baton.launch.cluster.policy`). It is one function, `tick`, called about once a second, which waits
for answers only, and for those not longer than seconds.

Routers come first, because nodes have to know where they are. One keeps the ports of its first life, so nodes find it
again by themselves when it starts anew on the same machine; on another one its address changes, and the nodes are
started anew with that. Those of a single router at once, because their requests are gone with it; with others there,
whose requests go on, one node after another, each after a drain.

A member goes away in two steps: it is asked to finish, hands over what it generates, and exits; what has not done so
in time is ended. A member that is not ready has nothing to finish.

Invariants: what the first tick finds running was started by an earlier life of this controller, and is adopted; no more
than one scaling change is under way; every change has a note that says why.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.launch.backoff import Backoff
from baton.launch.cluster.backend import Backend, Machine, Phase, Program, Report
from baton.launch.cluster.file import ClusterFile
from baton.launch.cluster.policy import Policy, Pressure
from baton.launch.cluster.programs import Ports, first_ports, node_program, router_program
from baton.launch.cluster.readings import RouterView
from baton.launch.cluster.status import GroupStatus, MemberStatus, Note, Status
from baton.wire.errors import ChildFailed, RequestFailed
from baton.wire.keys import ROUTER
from baton.wire.messages.membership import DECODE, PREFILL

LEAVE_MARGIN_S = 5.0
"""A program that is asked to stop finishes for its `shutdown_timeout_s`, and needs a little more to exit."""
MAX_NOTES = 100
_MAX_PORT_FAILURES = 2
"""Ends in a row after which a router no longer asks for the ports of its first life."""
_OVER = (Phase.EXITED, Phase.LOST)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Member:
    """A program that should run, or, with `leave_by_s`, that goes away until then. `renew_by_s`: it drains until then,
    is started anew, and is not ready again yet. `restart_s`: when it is started anew; None while it runs. `last_end`:
    why it ended last."""

    name: str
    role: str
    report: Report
    backoff: Backoff = field(default_factory=Backoff)
    restart_s: float | None = None
    leave_by_s: float | None = None
    renew_by_s: float | None = None
    last_end: str = ""

    @property
    def is_ready(self) -> bool:
        return self.report.phase == Phase.READY

    @property
    def is_leaving(self) -> bool:
        return self.leave_by_s is not None


class Controller:
    """The controller of one deployment. `make_view`: a view of the routers at these addresses."""

    def __init__(
        self,
        file: ClusterFile,
        backend: Backend,
        make_view: Callable[[Sequence[str]], RouterView],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._backend = backend
        self._make_view = make_view
        self._clock = clock
        self._policy = Policy(file)
        self._desired = {role: group.count for role, group in file.groups.items()}
        self._members: dict[str, _Member] = {}
        self._has_adopted = False
        self._is_stopping = False
        self._ports = {name: first_ports(file, name) for name in file.router_names}
        self._router_addresses: dict[str, str] = {}
        self._view: RouterView | None = None
        self._viewed: Sequence[str] = ()
        self._problem = ""
        self._machines: Sequence[Machine] = ()
        self._notes: deque[Note] = deque(maxlen=MAX_NOTES)

    # --- what is asked of it

    def stop(self) -> None:
        """Drain everything from now on, the router last. `status` says when it is over."""
        if not self._is_stopping:
            self._is_stopping = True
            self._note("the deployment is taken down")

    def tick(self) -> None:
        """Look at everything once, and do what is due. Raises `ChildFailed` when the backend does not answer."""
        now_s = self._clock()
        reports = self._backend.reports()
        self._machines = self._backend.machines()
        if not self._has_adopted:
            self._adopt(reports, now_s)
        for member in list(self._members.values()):
            self._follow(member, reports.get(member.name, Report(Phase.LOST, reason="it is not there")), now_s)
        if self._is_stopping:
            self._stop_members(now_s)
            return
        self._keep_routers(now_s)
        if self._knows_routers:
            for role in (PREFILL, DECODE):
                self._keep_group(role, now_s)
        self._scale(now_s)

    def status(self) -> Status:
        """The deployment as of the last tick."""
        return Status(
            name=self._file.name,
            addresses=[router.report.address for router in self._routers if router.report.address],
            is_stopping=self._is_stopping,
            is_over=self._is_stopping and not self._members,
            groups={role: self._group_status(role) for role in (PREFILL, DECODE)},
            members=[_member_status(member) for member in self._members.values()],
            machines=self._machines,
            changes=tuple(self._notes),
            problem=self._problem,
        )

    # --- members

    def _adopt(self, reports: Mapping[str, Report], now_s: float) -> None:
        """Take over what an earlier life of this controller started, and want as much of it."""
        self._has_adopted = True
        for name, report in reports.items():
            self._members[name] = member = _Member(name, name.partition("-")[0], report)
            if report.phase == Phase.STOPPING:
                member.leave_by_s = now_s + self._shutdown_s(member.role)
            self._note(f"{name} was found running")
        for role, group in self._file.groups.items() if reports else ():
            self._desired[role] = min(max(len(self._staying(role)), group.minimum), group.maximum)

    def _follow(self, member: _Member, report: Report, now_s: float) -> None:
        """Act on what has become of a member."""
        before, member.report = member.report, report
        if report.phase == Phase.READY and before.phase != Phase.READY:
            member.renew_by_s = None
            self._note(f"{member.name} is ready at {report.address} on {report.machine}")
        if member.is_leaving:
            self._follow_leaving(member, now_s)
        elif report.phase in _OVER and not self._is_stopping:
            if member.restart_s is None:
                delay_s = member.backoff.fail(now_s)
                member.restart_s, member.last_end = now_s + delay_s, report.reason
                if not self._is_stale(member):  # it was started anew and failed: others need not wait for it
                    member.renew_by_s = None
                what = "was lost" if report.phase == Phase.LOST else "stopped"
                when = f"in {delay_s:g} s" if delay_s else "now"
                self._note(f"{member.name} {what}: {report.reason}; starting it again {when}")
            if now_s >= member.restart_s:
                self._start(member, now_s)
        elif self._is_stale(member):
            self._renew(member, now_s)

    def _renew(self, member: _Member, now_s: float) -> None:
        """Start a stale node anew. Where there are other routers than the one that has moved, nodes do so one after
        another, and after a drain."""
        if member.renew_by_s is None and member.is_ready and self._file.num_routers > 1:
            if all(other.renew_by_s is None for other in self._members.values()):
                member.renew_by_s = now_s + self._shutdown_s(member.role)
                self._note(f"{member.name} drains to be started anew: {self._where_routers_are}")
                self._backend.terminate(member.name)
        elif member.renew_by_s is None or now_s >= member.renew_by_s:
            self._note(f"{member.name} is started anew: {self._where_routers_are}")
            self._backend.remove(member.name)
            self._start(member, now_s)

    def _follow_leaving(self, member: _Member, now_s: float) -> None:
        is_overdue = member.leave_by_s is not None and now_s >= member.leave_by_s
        if member.report.phase in _OVER or is_overdue:
            self._backend.remove(member.name)
            del self._members[member.name]
            late = ", ended because it did not finish in time" if member.report.phase not in _OVER else ""
            self._note(f"{member.name} has left{late}")

    def _start(self, member: _Member, now_s: float) -> None:
        member.restart_s = None
        member.backoff.start(now_s)
        member.report = Report(Phase.PLACING)
        try:
            self._backend.start(self._program(member))
        except ChildFailed as error:
            member.report = Report(Phase.LOST, reason=str(error))
            member.restart_s = now_s + member.backoff.fail(now_s)
            self._note(f"{member.name} cannot be started: {error}")

    def _program(self, member: _Member) -> Program:
        if member.role != ROUTER:
            return node_program(self._file, self._file.groups[member.role], member.name, self._control_addresses)
        if member.backoff.num_failures > _MAX_PORT_FAILURES:
            self._ports[member.name] = first_ports(self._file, member.name)
        return router_program(self._file, member.name, self._ports[member.name])

    def _leave(self, member: _Member, now_s: float) -> None:
        """Begin to take a member away."""
        if member.is_leaving:
            return
        if not member.is_ready:
            self._backend.remove(member.name)
            del self._members[member.name]
            self._note(f"{member.name} has left before it was ready")
            return
        member.leave_by_s = now_s + self._shutdown_s(member.role)
        self._note(f"{member.name} drains")
        self._backend.terminate(member.name)

    def _stop_members(self, now_s: float) -> None:
        nodes = [member for member in self._members.values() if member.role != ROUTER]
        for member in nodes or list(self._members.values()):
            self._leave(member, now_s)

    # --- the routers and the groups

    def _keep_routers(self, now_s: float) -> None:
        for name in self._file.router_names:
            member = self._members.get(name)
            if member is None:
                member = self._members[name] = _Member(name, ROUTER, Report(Phase.PLACING))
                self._start(member, now_s)
            elif member.is_ready:
                self._router_addresses[name] = member.report.control_address
                self._ports[name] = Ports(_port(member.report.address), _port(member.report.control_address))

    def _keep_group(self, role: str, now_s: float) -> None:
        staying = self._staying(role)
        for _ in range(len(staying), self._desired[role]):
            name = next(
                name for index in range(len(self._members) + 1) if (name := f"{role}-{index}") not in self._members
            )
            member = self._members[name] = _Member(name, role, Report(Phase.PLACING))
            self._note(f"{name} is placed: {self._desired[role]} {role} nodes are wanted")
            self._start(member, now_s)
        if len(staying) > self._desired[role]:
            loads: Counter[str] = Counter()  # of nodes, or groups of them
            for node in self._view.nodes if self._view else ():
                loads[node.get("group") or node.get("id", "")] += node.get("load", 0)
            # first what has nothing to finish, then what has least
            self._leave(min(staying, key=lambda each: (each.is_ready, loads[each.name], -_index(each.name))), now_s)

    def _scale(self, now_s: float) -> None:
        if missing := [router.name for router in self._routers if not router.is_ready]:
            self._problem = f"not ready: {', '.join(missing)}"
            return
        try:
            view = self._look([router.report.address for router in self._routers], now_s)
        except RequestFailed as error:
            self._problem = str(error)
            return
        self._problem = ""
        is_as_wanted = all(member.is_ready and not member.is_leaving for member in self._members.values())
        if not is_as_wanted or any(len(self._staying(role)) != count for role, count in self._desired.items()):
            self._policy.settle(now_s)
            return
        reading = view.reading()
        change = None if reading is None else self._policy.decide(reading, self._desired, now_s)
        if change is not None:
            before = self._desired[change.role]
            self._note(f"{change.role} nodes: {change.count} instead of {before}, because {change.reason}")
            self._desired[change.role] = change.count

    def _look(self, addresses: Sequence[str], now_s: float) -> RouterView:
        if self._view is None or self._viewed != addresses:
            self._view, self._viewed = self._make_view(addresses), addresses
        self._view.look(now_s)
        return self._view

    # --- small questions

    def _is_stale(self, member: _Member) -> bool:
        """Whether it is a node that does not know where the routers are now."""
        is_known = member.role != ROUTER and bool(member.report.arguments) and self._knows_routers
        return is_known and member.report.arguments != self._program(member).arguments

    @property
    def _routers(self) -> list[_Member]:
        return [member for member in self._members.values() if member.role == ROUTER]

    @property
    def _control_addresses(self) -> list[str]:
        return [self._router_addresses[name] for name in self._file.router_names]

    @property
    def _knows_routers(self) -> bool:
        """Whether each has been ready once."""
        return len(self._router_addresses) == self._file.num_routers

    @property
    def _where_routers_are(self) -> str:
        what = "the router is at" if self._file.num_routers == 1 else "the routers are at"
        return f"{what} {', '.join(self._control_addresses)} now"

    def _staying(self, role: str) -> list[_Member]:
        return [member for member in self._members.values() if member.role == role and not member.is_leaving]

    def _shutdown_s(self, role: str) -> float:
        settings = self._file.router if role == ROUTER else self._file.groups[role].settings
        return settings.shutdown_timeout_s + LEAVE_MARGIN_S

    def _group_status(self, role: str) -> GroupStatus:
        group, staying = self._file.groups[role], self._staying(role)
        pressure = self._policy.pressures.get(role, Pressure())
        return GroupStatus(
            desired=self._desired[role],
            minimum=group.minimum,
            maximum=group.maximum,
            running=len(staying),
            ready=sum(member.is_ready for member in staying),
            pressure=round(pressure.value, 3),
            reason=pressure.reason,
        )

    def _note(self, text: str) -> None:
        _log.info("%s", text)
        self._notes.append(Note(time.time(), text))


def _member_status(member: _Member) -> MemberStatus:
    report = member.report
    return MemberStatus(
        name=member.name,
        role=member.role,
        phase=str(report.phase),
        machine=report.machine,
        address=report.address,
        pid=report.pid,
        is_leaving=member.is_leaving,
        num_failures=0 if member.is_ready else member.backoff.num_failures,
        reason=report.reason or ("" if member.is_ready else member.last_end),
    )


def _port(address: str) -> int:
    """0 when the address has none."""
    return urlsplit(address).port or 0


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])
