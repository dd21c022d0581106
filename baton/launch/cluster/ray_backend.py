"""A deployment on a Ray cluster: a placement group and an actor for each member, and one more actor for the controller.

Owns everything that is asked of Ray. Ray finds the machines, holds the places, notices what has died, and starts the
controller again elsewhere when its machine dies. No engine runs in a worker of Ray: an actor watches over one program
(`baton.launch.cluster.keeper`), which is a process of its own.

All of a deployment is in the namespace `baton-NAME`: the actor `controller`, and what `ray_places` says of each member;
the token in its names tells one life of its place from another. The place of a member that is spread over several
machines is lost with what watches on any of them. All are detached: they outlive the command that made them, and
nothing of them ends by itself.

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
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import (
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.launch.api_client import ApiClient
from baton.launch.cluster.backend import Machine, Phase, Program, Report
from baton.launch.cluster.controller import Controller
from baton.launch.cluster.file import ClusterFile, parse_cluster_file
from baton.launch.cluster.keeper import Keeper, Secrets
from baton.launch.cluster.loop import ControllerLoop
from baton.launch.cluster.ray_places import (
    REPORT_S,
    Post,
    Seat,
    actor_names,
    answer,
    end,
    first_line,
    known_groups,
    machine_name,
    names_of,
    namespace,
    place_of,
    waits_for,
)
from baton.launch.cluster.readings import RouterView
from baton.launch.cluster.status import Status
from baton.launch.console import Console
from baton.launch.settings import LOOPBACK
from baton.runtime.process import configure_logging
from baton.wire.errors import ChildFailed, InvalidSetting

CONTROLLER = "controller"
CLOSE_S = 5.0
CALL_S = 120.0
LOOK_S = 3.0
_LIST_S = 10.0
_STANDARD = {"CPU": "num_cpus", "GPU": "num_gpus"}
_HIDDEN = ("node:", "memory", "object_store_memory", "accelerator_type:")
_log = logging.getLogger(__name__)


class KeeperActor:
    """A keeper on the machine where Ray has placed it. Its methods run on the main thread of its worker, one at a time,
    so the program dies with the worker."""

    def __init__(self, listens_on_machine: bool) -> None:
        configure_logging("info")
        address = ray.util.get_node_ip_address() if listens_on_machine else LOOPBACK
        self._keeper = Keeper(machine_name(ray.get_runtime_context().get_node_id()), address, Console(sys.stderr))

    def meeting_place(self) -> str:
        """HOST:PORT at which the program waits for those on further machines."""
        return self._keeper.meeting_place()

    def start(self, program: Program, known: Secrets, dials: str = "") -> None:
        self._keeper.start(program, known, dials)

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
        """The status as of the last round."""
        return self._loop.status()

    def stop(self) -> None:
        """Take everything down; `status` says when it is over."""
        self._loop.stop()


class RayBackend:
    """Runs members in actors of a Ray cluster, and finds those that run already. Raises `ChildFailed`."""

    def __init__(self, file: ClusterFile, known: Secrets) -> None:
        self._file = file
        self._secrets = known
        self._seats: dict[str, Seat] = {}
        self._adopt()

    def start(self, program: Program) -> None:
        """Place the member if it has no place or was lost, then start its program. One that runs is left alone."""
        seat = self._seats.get(program.name)
        if seat is not None and seat.report.phase == Phase.LOST:
            self.remove(program.name)
            seat = None
        if seat is None:
            seat = self._seats[program.name] = self._place(program)
        elif seat.report.phase != Phase.EXITED:
            return
        seat.program = program
        for post in seat.posts:
            post.question = None
            post.report = Report(Phase.PLACING if post.report.phase == Phase.PLACING else Phase.STARTING)
        own, *further = (post.actor for post in seat.posts)
        own.start.remote(program, self._secrets)
        for actor, each in zip(further, program.further, strict=True):
            # Ray calls it when the member's machine has answered
            actor.start.remote(each, self._secrets, own.meeting_place.remote())

    def terminate(self, name: str) -> None:
        """Ask the program to finish and exit. Parts of it on further machines run until it needs them no more."""
        seat = self._seats.get(name)
        if seat is not None and seat.report.phase != Phase.LOST:
            # what is on further machines goes on until the member needs it no more
            seat.posts[0].actor.terminate.remote()
            seat.posts[0].question = None

    def remove(self, name: str) -> None:
        """End the member's programs, then its actors and its places on the cluster."""
        seat = self._seats.pop(name, None)
        if seat is None:
            return
        placed = [post for post in seat.posts if post.report.phase not in (Phase.PLACING, Phase.LOST)]
        # so that their whole process groups end, and not only what the kernel ties to the actors
        for closing in [post.actor.close.remote() for post in placed]:
            with contextlib.suppress(RayError):
                ray.get(closing, timeout=CLOSE_S)
        end([post.actor for post in seat.posts], seat.group)

    def reports(self) -> Mapping[str, Report]:
        """All members by name, as their actors last said. Waits at most `REPORT_S` seconds for answers."""
        posts = [(seat, post) for seat in self._seats.values() for post in seat.posts]
        for _, post in posts:
            if post.question is None and post.report.phase != Phase.LOST:
                post.question = post.actor.report.remote()
        asked = [(seat, post) for seat, post in posts if post.question is not None]
        placed = [post.question for _, post in asked if post.report.phase != Phase.PLACING]
        if placed:
            ray.wait(placed, num_returns=len(placed), timeout=REPORT_S)
        questions = [post.question for _, post in asked]
        answered = set(ray.wait(questions, num_returns=len(questions), timeout=0)[0]) if questions else set()
        for seat, post in asked:
            if post.question in answered:
                post.report = answer(seat, post)
                post.question = None
            elif post.report.phase == Phase.PLACING:
                post.report = replace(post.report, reason=waits_for(seat))
        return {name: seat.report for name, seat in self._seats.items()}

    def machines(self) -> Sequence[Machine]:
        """The live machines of the Ray cluster, with their addresses and resources."""
        return [
            Machine(
                machine_name(node["NodeID"]),
                node["NodeManagerAddress"],
                {name: amount for name, amount in node["Resources"].items() if not name.startswith(_HIDDEN)},
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def _place(self, program: Program) -> Seat:
        """A place with an actor for each machine in it, as soon as Ray has one."""
        name, count = f"{program.name}.{secrets.token_hex(4)}", 1 + len(program.further)
        try:
            # one bundle for all ranks of a machine, which share its memory
            group = placement_group(
                [dict(program.resources)] * count, strategy="STRICT_SPREAD", name=name, lifetime="detached"
            )
            options = {_STANDARD[key]: amount for key, amount in program.resources.items() if key in _STANDARD}
            actors = [
                ray.remote(KeeperActor).options(
                    name=each,
                    namespace=namespace(self._file.name),
                    lifetime="detached",
                    max_restarts=0,
                    resources={key: amount for key, amount in program.resources.items() if key not in _STANDARD},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                    **{"num_cpus": 0, **options},
                )
                for bundle, each in enumerate(actor_names(name, count))
            ]
            posts = [Post(each.remote(self._file.listens_on_machine), Report(Phase.PLACING)) for each in actors]
            return Seat(posts, group, program)
        except (RayError, ValueError) as error:
            raise ChildFailed(f"Ray has no place for {program.name}: {error}") from None

    def _adopt(self) -> None:
        places = [place_of(name) for name in names_of(self._file.name) if name != CONTROLLER]
        groups = known_groups()
        for place in dict.fromkeys((*places, *groups)):
            member, group = place.partition(".")[0], groups.get(place)
            posts = [self._found(name) for name in actor_names(place, group.bundle_count if group else 1)]
            if member in self._seats:  # the life before died while it replaced this member
                end([post.actor for post in posts], group)
            else:
                self._seats[member] = Seat(posts, group, None)

    def _found(self, name: str) -> Post:
        """What an earlier life has begun under this name."""
        try:
            # asked at once: "starting" is what one is that may or may not have been told to
            return Post(ray.get_actor(name, namespace(self._file.name)), Report(Phase.STARTING))
        except ValueError:
            return Post(None, Report(Phase.LOST, reason="what watched over it is gone"))


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
            f"`ray start --address=HOST:PORT` ({first_line(error)})"
        ) from None


def disconnect() -> None:
    """Leave the Ray cluster."""
    ray.shutdown()


class Deployed:
    """A controller that runs on Ray, as a command sees it."""

    def __init__(self, deployment: str) -> None:
        """Find the controller of that deployment. Raises `InvalidSetting` when there is none."""
        try:
            self._actor = ray.get_actor(CONTROLLER, namespace(deployment))
        except ValueError:
            raise InvalidSetting(f"no deployment called {deployment} is up: `baton cluster up FILE`") from None

    @staticmethod
    def begin(file: ClusterFile, text: str, origin: str, known: Secrets) -> Deployed:
        """Start a deployment. Raises `InvalidSetting` when there is one of that name."""
        if CONTROLLER in names_of(file.name):
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
        """The status of the deployment, as its controller says. Raises `ChildFailed` when it does not answer."""
        status: Status = self._ask(self._actor.status)
        return status

    def stop(self) -> None:
        """Begin to take the deployment down. Raises `ChildFailed`."""
        self._ask(self._actor.stop)

    def _ask(self, method: Any) -> Any:
        deadline_s = time.monotonic() + CALL_S
        while True:
            try:
                return ray.get(method.remote(), timeout=max(0.1, deadline_s - time.monotonic()))
            except ActorUnavailableError as error:  # Ray is starting it again
                if time.monotonic() > deadline_s:
                    raise ChildFailed(f"the controller does not answer: {first_line(error)}") from None
                time.sleep(0.5)
            except (GetTimeoutError, RayError) as error:
                raise ChildFailed(f"the controller does not answer: {first_line(error)}") from None


def sweep(deployment: str) -> int:
    """End whatever of a deployment is left; how many members that were."""
    left, groups = names_of(deployment), known_groups()
    # the controller first: it would start the others again
    for name in sorted(left, key=lambda name: name != CONTROLLER):
        with contextlib.suppress(ValueError):
            end([ray.get_actor(name, namespace(deployment))], None)
    for group in groups.values():
        remove_placement_group(group)
    return len({place_of(name) for name in left if name != CONTROLLER})
