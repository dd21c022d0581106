"""A deployment on a Ray cluster: a placement group and an actor for each member, and one more actor for the controller.

Owns everything that is said to Ray, and is the only module that imports it. Ray finds the machines, holds the places,
notices what has died, and starts the controller again elsewhere when its machine dies. No engine runs in a worker of
Ray: an actor watches over one program (`launch.cluster.keeper`), which is a process of its own.

All of a deployment is in the namespace `baton-NAME`: the actor `controller`, and for each member an actor
`MEMBER.TOKEN` with a placement group of the same name, where the token tells one life of its place from another. They
are detached: they outlive the command that made them, and nothing of them ends by itself.

Invariants: every answer that is waited for has a deadline; who was not found a place is asked nothing; at most one
question to an actor is open.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.api_client import ApiClient
from launch.cluster.backend import Machine, Phase, Program, Report
from launch.cluster.controller import Controller
from launch.cluster.file import ClusterFile, parse_cluster_file
from launch.cluster.keeper import Keeper, Secrets
from launch.cluster.loop import ControllerLoop
from launch.cluster.readings import RouterView
from launch.cluster.status import Status
from launch.console import Console
from launch.settings import LOOPBACK
from program.process import configure_logging
from wire.errors import ChildFailed, InvalidSetting

CONTROLLER = "controller"
REPORT_S = 2.0
"""How long a round waits for reports of members; who is later is as it was."""
CLOSE_S = 5.0
CALL_S = 120.0
LOOK_S = 3.0
_LIST_S = 10.0
_NAME_LENGTH = 12
_STANDARD = {"CPU": "num_cpus", "GPU": "num_gpus"}
_HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:")
_log = logging.getLogger(__name__)


class KeeperActor:
    """A keeper on the machine where Ray has placed it. Its methods run on the main thread of its worker, one at a time,
    so the program dies with the worker."""

    def __init__(self, listens_on_machine: bool) -> None:
        configure_logging("info")
        address = ray.util.get_node_ip_address() if listens_on_machine else LOOPBACK
        self._keeper = Keeper(_machine_name(ray.get_runtime_context().get_node_id()), address, Console(sys.stderr))

    def start(self, program: Program, known: Secrets) -> None:
        """See `Keeper`, as for the others."""
        self._keeper.start(program, known)

    def terminate(self) -> None:
        self._keeper.terminate()

    def report(self) -> Report:
        return self._keeper.report()

    def close(self) -> None:
        self._keeper.close()


class ControllerActor:
    """The controller of the deployment that `text` describes. When it has died, Ray makes another of the same."""

    def __init__(self, text: str, origin: str, known: Secrets) -> None:
        configure_logging("info")
        file = parse_cluster_file(text, origin)

        def make_view(addresses: Sequence[str]) -> RouterView:
            clients = [ApiClient(address, known.api_key, LOOK_S) for address in addresses]
            return RouterView(clients, file.scaling.window_s)

        self._loop = ControllerLoop(Controller(file, RayBackend(file, known), make_view))

    def status(self) -> Status:
        """As of the last round."""
        return self._loop.status()

    def stop(self) -> None:
        """Take everything down; `status` says when it is over."""
        self._loop.stop()


@dataclass(slots=True)
class _Seat:
    """A member's actor, None when it was lost before it was found, and placement group. `question`: the report that it
    was asked for and has not given yet."""

    actor: Any
    group: PlacementGroup | None
    program: Program | None
    report: Report
    question: Any = None


class RayBackend:
    """See `launch.cluster.backend.Backend`. Finds the members that run already. Raises `ChildFailed`."""

    def __init__(self, file: ClusterFile, known: Secrets) -> None:
        self._file = file
        self._secrets = known
        self._seats: dict[str, _Seat] = {}
        self._adopt()

    def start(self, program: Program) -> None:
        """See `Backend`."""
        seat = self._seats.get(program.name)
        if seat is not None and seat.report.phase == Phase.LOST:
            self.remove(program.name)
            seat = None
        if seat is None:
            seat = self._seats[program.name] = self._place(program)
        elif seat.report.phase != Phase.EXITED:
            return
        seat.program, seat.question = program, None
        seat.report = Report(Phase.PLACING if seat.report.phase == Phase.PLACING else Phase.STARTING)
        seat.actor.start.remote(program, self._secrets)

    def terminate(self, name: str) -> None:
        """See `Backend`."""
        seat = self._seats.get(name)
        if seat is not None and seat.report.phase != Phase.LOST:
            seat.actor.terminate.remote()
            seat.question = None

    def remove(self, name: str) -> None:
        """See `Backend`."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        if seat.report.phase not in (Phase.PLACING, Phase.LOST):
            # so that its whole process group ends, and not only what the kernel ties to the actor
            with contextlib.suppress(RayError):
                ray.get(seat.actor.close.remote(), timeout=CLOSE_S)
        _end(seat.actor, seat.group)

    def reports(self) -> Mapping[str, Report]:
        """See `Backend`."""
        for seat in self._seats.values():
            if seat.question is None and seat.report.phase != Phase.LOST:
                seat.question = seat.actor.report.remote()
        asked = [seat for seat in self._seats.values() if seat.question is not None]
        placed = [seat.question for seat in asked if seat.report.phase != Phase.PLACING]
        if placed:
            ray.wait(placed, num_returns=len(placed), timeout=REPORT_S)
        questions = [seat.question for seat in asked]
        answered = set(ray.wait(questions, num_returns=len(questions), timeout=0)[0]) if questions else set()
        for seat in asked:
            if seat.question in answered:
                seat.report = _answer(seat)
                seat.question = None
            elif seat.report.phase == Phase.PLACING:
                seat.report = replace(seat.report, reason=_waits_for(seat))
        return {name: seat.report for name, seat in self._seats.items()}

    def machines(self) -> Sequence[Machine]:
        """See `Backend`."""
        return [
            Machine(
                _machine_name(node["NodeID"]),
                node["NodeManagerAddress"],
                {name: amount for name, amount in node["Resources"].items() if not name.startswith(_HIDDEN)},
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _place(self, program: Program) -> _Seat:
        """A place with an actor in it, as soon as Ray has one."""
        name = f"{program.name}.{secrets.token_hex(4)}"
        try:
            # one bundle for all ranks, which share the memory of their machine
            group = placement_group([dict(program.resources)], strategy="STRICT_PACK", name=name, lifetime="detached")
            options = {_STANDARD[key]: amount for key, amount in program.resources.items() if key in _STANDARD}
            actor = ray.remote(KeeperActor).options(
                name=name,
                namespace=namespace(self._file.name),
                lifetime="detached",
                max_restarts=0,
                resources={key: amount for key, amount in program.resources.items() if key not in _STANDARD},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                **{"num_cpus": 0, **options},
            )
            return _Seat(actor.remote(self._file.listens_on_machine), group, program, Report(Phase.PLACING))
        except (RayError, ValueError) as error:
            raise ChildFailed(f"Ray has no place for {program.name}: {error}") from None

    def _adopt(self) -> None:
        actors = [name for name in _names(self._file.name) if name != CONTROLLER]
        groups = _groups()
        for name in (*actors, *(name for name in groups if name not in actors)):
            member, actor = name.partition(".")[0], None
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(name, namespace(self._file.name))
            if member in self._seats:  # the life before died while it replaced this member
                _end(actor, groups.get(name))
            elif actor is None:
                lost = Report(Phase.LOST, reason="what watched over it is gone")
                self._seats[member] = _Seat(None, groups.get(name), None, lost)
            else:
                # asked at once: "starting" is what one is that may or may not have been told to
                self._seats[member] = _Seat(actor, groups.get(name), None, Report(Phase.STARTING))


def namespace(deployment: str) -> str:
    """The namespace of a deployment in Ray."""
    return f"baton-{deployment}"


def connect(deployment: str, address: str) -> None:
    """Join the Ray cluster at `address`, "" for that of this machine. Raises `InvalidSetting`."""
    try:
        ray.init(
            address=address or "auto",
            namespace=namespace(deployment),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, RayError) as error:
        where = f"at {address}" if address else "on this machine"
        raise InvalidSetting(
            f"there is no Ray cluster {where}: begin one with `ray start --head`, and join it from other machines with "
            f"`ray start --address=HOST:PORT` ({_first_line(error)})"
        ) from None


def disconnect() -> None:
    """Leave the Ray cluster."""
    ray.shutdown()


class Deployed:
    """A controller that runs on Ray, as a command sees it."""

    def __init__(self, deployment: str) -> None:
        """Find it. Raises `InvalidSetting` when there is none."""
        try:
            self._actor = ray.get_actor(CONTROLLER, namespace(deployment))
        except ValueError:
            raise InvalidSetting(f"no deployment called {deployment} is up: `baton cluster up FILE`") from None

    @staticmethod
    def begin(file: ClusterFile, text: str, origin: str, known: Secrets) -> Deployed:
        """Start one. Raises `InvalidSetting` when there is one of that name."""
        if CONTROLLER in _names(file.name):
            raise InvalidSetting(f"{file.name} is up already: `baton cluster down --name {file.name}` first")
        ray.remote(ControllerActor).options(
            name=CONTROLLER,
            namespace=namespace(file.name),
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
        ).remote(text, origin, known)
        return Deployed(file.name)

    def status(self) -> Status:
        """Raises `ChildFailed` when it does not answer."""
        status: Status = self._ask(self._actor.status)
        return status

    def stop(self) -> None:
        """Begin to take it down. Raises `ChildFailed`."""
        self._ask(self._actor.stop)

    def _ask(self, method: Any) -> Any:
        deadline_s = time.monotonic() + CALL_S
        while True:
            try:
                return ray.get(method.remote(), timeout=max(0.1, deadline_s - time.monotonic()))
            except ActorUnavailableError as error:  # Ray is starting it again
                if time.monotonic() > deadline_s:
                    raise ChildFailed(f"the controller does not answer: {_first_line(error)}") from None
                time.sleep(0.5)
            except (GetTimeoutError, RayError) as error:
                raise ChildFailed(f"the controller does not answer: {_first_line(error)}") from None


def sweep(deployment: str) -> int:
    """End whatever of a deployment is left; how many actors that were, the controller not counted."""
    left, groups = _names(deployment), _groups()
    # the controller first: it would start the others again
    for name in sorted(left, key=lambda name: name != CONTROLLER):
        with contextlib.suppress(ValueError):
            _end(ray.get_actor(name, namespace(deployment)), None)
    for group in groups.values():
        remove_placement_group(group)
    return sum(name != CONTROLLER for name in left)


def _names(deployment: str) -> list[str]:
    """Of all actors of a deployment that live."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == namespace(deployment)]


def _groups() -> dict[str, PlacementGroup]:
    """The placement groups of this process's namespace, by name."""
    names = [found["name"] for found in placement_group_table().values() if found["state"] != "REMOVED"]
    found = {}
    for name in filter(None, names):
        with contextlib.suppress(ValueError):  # of another namespace
            found[name] = get_placement_group(name)
    return found


def _end(actor: Any, group: PlacementGroup | None) -> None:
    if actor is not None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)


def _answer(seat: _Seat) -> Report:
    """What an actor has answered, or what has become of it."""
    try:
        report: Report = ray.get(seat.question, timeout=REPORT_S)
        if seat.program is None and report.phase == Phase.PLACING:
            # an earlier controller has made it, and died before it said what to run
            return replace(report, phase=Phase.EXITED, reason="it was not started")
        return report
    except (ActorUnavailableError, GetTimeoutError):
        return seat.report  # Ray finds out whether it is dead
    except RayActorError as error:
        return Report(Phase.LOST, seat.report.machine, reason=_why(error), pid=seat.report.pid)
    except RayError as error:
        return replace(seat.report, phase=Phase.EXITED, reason=_first_line(error))


def _waits_for(seat: _Seat) -> str:
    if seat.group is None or seat.program is None:
        return ""
    if placement_group_table(seat.group).get("state") == "CREATED":
        return "its machine starts what watches over it"
    needs = " and ".join(f"{amount:g} {name}" for name, amount in seat.program.resources.items())
    return f"waits for a machine with {needs}"


def _why(error: RayActorError) -> str:
    """The sentence of Ray's explanation that names a cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line), _first_line(error))[:300]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _machine_name(node_id: str) -> str:
    return node_id[:_NAME_LENGTH]
