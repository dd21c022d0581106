"""The places of a deployment's members on a Ray cluster: what watches there, under which names, and what it says.

Owns those names, and the meaning of what Ray answers. A member has a placement group `MEMBER.TOKEN` in the namespace of
its deployment, an actor of the same name, and, where it is spread over several machines, an actor
`MEMBER.TOKEN.NUMBER` on each further one. Decides nothing: `ray_backend` does. These two are all that know Ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group_table, remove_placement_group

from baton.launch.cluster.backend import Phase, Program, Report

REPORT_S = 2.0
"""How long a round waits for reports of members; who is later is as it was."""
_NAME_LENGTH = 12


@dataclass(slots=True)
class Post:
    """A program's actor and what it has reported. The actor is None when it was lost before it was found. `question`:
    the report that it was asked for and has not given yet."""

    actor: Any
    report: Report
    question: Any = None


@dataclass(slots=True)
class Seat:
    """A member's place. `posts`: the member's own, and those on its further machines behind it."""

    posts: list[Post]
    group: PlacementGroup | None
    program: Program | None

    @property
    def report(self) -> Report:
        """The report of the member. A part of it on another machine that was lost, or has exited, counts for all of
        it."""
        own, *further = (post.report for post in self.posts)
        if own.phase == Phase.LOST:
            return own
        for phase in (Phase.LOST, Phase.EXITED):
            fallen = next((each for each in further if each.phase == phase), None)
            if fallen is not None and own.phase != phase:
                where = f"on machine {fallen.machine}" if fallen.machine else "on another machine"
                return replace(own, phase=phase, reason=f"{where}: {fallen.reason}")
        return own


def namespace(deployment: str) -> str:
    """The namespace of a deployment in Ray."""
    return f"baton-{deployment}"


def names_of(deployment: str) -> list[str]:
    """The names of all live actors of a deployment."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == namespace(deployment)]


def known_groups() -> dict[str, PlacementGroup]:
    """The placement groups of this process's namespace, by name."""
    names = [found["name"] for found in placement_group_table().values() if found["state"] != "REMOVED"]
    found = {}
    for name in filter(None, names):
        with contextlib.suppress(ValueError):  # of another namespace
            found[name] = get_placement_group(name)
    return found


def actor_names(place: str, count: int) -> list[str]:
    """The names of the actors at a place with so many machines."""
    return [place, *(f"{place}.{number}" for number in range(1, count))]


def place_of(actor_name: str) -> str:
    return ".".join(actor_name.split(".")[:2])


def end(actors: Sequence[Any], group: PlacementGroup | None) -> None:
    for actor in actors:
        if actor is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)


def answer(seat: Seat, post: Post) -> Report:
    """The answer of an actor, or a report of how it was lost."""
    try:
        report: Report = ray.get(post.question, timeout=REPORT_S)
        if seat.program is None and report.phase == Phase.PLACING:
            # an earlier controller has made it, and died before it said what to run
            return replace(report, phase=Phase.EXITED, reason="it was not started")
        return report
    except (ActorUnavailableError, GetTimeoutError):
        return post.report  # Ray finds out whether it is dead
    except RayActorError as error:
        return Report(Phase.LOST, post.report.machine, reason=_why(error), pid=post.report.pid)
    except RayError as error:
        return replace(post.report, phase=Phase.EXITED, reason=first_line(error))


def waits_for(seat: Seat) -> str:
    if seat.group is None or seat.program is None:
        return ""
    if placement_group_table(seat.group).get("state") == "CREATED":
        return "its machine starts what watches over it"
    needs = " and ".join(f"{amount:g} {name}" for name, amount in seat.program.resources.items())
    count = 1 + len(seat.program.further)
    return f"waits for a machine with {needs}" if count == 1 else f"waits for {count} machines with {needs} each"


def _why(error: RayActorError) -> str:
    """The sentence of Ray's explanation that names a cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line), first_line(error))[:300]


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def machine_name(node_id: str) -> str:
    return node_id[:_NAME_LENGTH]
