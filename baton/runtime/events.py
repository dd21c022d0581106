"""Events that a program of Baton prints to stdout: the progress of its start, that it is ready, that it was drained.

Owns the writing and the parsing of such a line: one JSON object, `{"event": "ready", ...}`, when a program reads it,
and words when a person does at a terminal. Does not know which programs write and read.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass

WEIGHTS, GRAPHS = "weights", "graphs"
"""Stages of a start: bytes of weights that are read, decode steps that are recorded as CUDA graphs."""
_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Loading:
    """The progress of a stage of the start, in bytes of `WEIGHTS` or a number of `GRAPHS`."""

    role: str
    done: int
    total: int
    stage: str = WEIGHTS


@dataclass(frozen=True, slots=True)
class Ready:
    """The program has started and does its work. `address`: its HTTP port. "" stands for an address that it does not
    have.

    `control_address` is where nodes reach a router, `peer_address` where nodes reach a node.
    """

    role: str
    address: str
    control_address: str = ""
    peer_address: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """The program ends because an operator has drained it: nobody should start it again."""

    role: str


Event = Loading | Ready | Drained


def emit(event: Event) -> None:
    """Print `event` to stdout."""
    sys.stdout.write(_for_person(event) if sys.stdout.isatty() else _for_program(event))
    sys.stdout.flush()


def parse_event(line: str) -> Event | None:
    """The event in one line of a program's stdout, None when it is any other text."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    match fields:
        case {"event": "ready", "role": str(role)}:
            addresses = {name: fields.get(name, "") for name in ("address", "control_address", "peer_address")}
            return Ready(role, **addresses) if all(isinstance(text, str) for text in addresses.values()) else None
        case {"event": "drained", "role": str(role)}:
            return Drained(role)
        case {"event": "loading", "role": str(role), "done": int(done), "total": int(total)}:
            return Loading(role, done, total, GRAPHS if fields.get("stage") == GRAPHS else WEIGHTS)
        case _:
            return None


def _for_program(event: Event) -> str:
    return json.dumps({"event": type(event).__name__.lower(), **dataclasses.asdict(event)}) + "\n"


def _for_person(event: Event) -> str:
    """The event for a terminal; a line about loading is overwritten by the next one."""
    if isinstance(event, Loading):
        filled = _BAR_WIDTH * event.done // max(1, event.total)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        if event.stage == GRAPHS:
            line = f"recording CUDA graphs [{bar}] {event.done} of {event.total}"
        else:
            line = f"loading weights [{bar}] {event.done / 1e6:.0f} of {event.total / 1e6:.0f} MB"
        return f"\r{line}" + "\n" * (event.done == event.total)
    if isinstance(event, Drained):
        return f"{event.role} is drained\n"
    line = f"{event.role} ready at {event.address}"
    if event.control_address:
        line += f", nodes join with --router {event.control_address}"
    return line + "\n"
