"""`baton cluster up FILE`, `status` and `down`: a deployment that a file describes, from the command line.

    baton cluster up FILE           start it on a Ray cluster, and come back when it is ready
    baton cluster up --local FILE   serve it from this machine, like `baton serve`, until Ctrl-C
    baton cluster status            what runs where, what changed last and why; --json for programs
    baton cluster down              drain it, end it, and leave nothing

Owns what is said, and how long each command waits. Does not know Ray, which is loaded only by a command that needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.launch import serve
from baton.launch.cluster.file import LOCAL, ClusterFile, read_cluster_file
from baton.launch.cluster.status import Note, Status, shown
from baton.router.http.access.keys import KEY_VARIABLE
from baton.runtime.command_line import CommandParser, number_in
from baton.runtime.ranges import SECONDS_OR_NONE
from baton.wire.errors import BatonError, ChildFailed, InvalidSetting

if TYPE_CHECKING:
    from types import ModuleType

    from baton.launch.cluster.keeper import Secrets

DEFAULT_NAME = "baton"
DEFAULT_DOWN_S = 120.0
_MAX_FAILURES = 2
"""Ends of a program in a row after which `up` gives up: its settings are wrong, or its model is missing."""
_POLL_S = 0.5


def main(arguments: Sequence[str]) -> int:
    """Run one of the three; its exit status. Raises `BatonError`."""
    parsed = _parser().parse(arguments)
    run: Callable[[argparse.Namespace], int] = {"up": _up, "status": _status, "down": _down}[parsed.command]
    return run(parsed)


def _parser() -> CommandParser:
    parser = CommandParser(prog="baton cluster", description="Start, show and end a deployment that a file describes.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start it")
    up.add_argument("file", type=Path, metavar="FILE", help="TOML file; docs/operations/cluster.md says what is in it")
    up.add_argument("--local", action="store_true", help='as with backend = "local": serve it from this machine')
    status = commands.add_parser("status", help="show it")
    status.add_argument("--json", action="store_true", help="one JSON object")
    down = commands.add_parser("down", help="end it")
    down.add_argument(
        "--timeout-s",
        type=number_in(SECONDS_OR_NONE),
        default=DEFAULT_DOWN_S,
        help="seconds to finish running requests (default: 120)",
    )
    for command in (status, down):
        command.add_argument("--name", default=DEFAULT_NAME, help=f"the file's `name` (default: {DEFAULT_NAME})")
    for command in (up, status, down):
        command.add_argument(
            "--address",
            default="",
            metavar="HOST:PORT",
            help="of the Ray cluster (default: $RAY_ADDRESS, or the one here)",
        )
    return parser


def _up(parsed: argparse.Namespace) -> int:
    file, text = read_cluster_file(parsed.file)
    if parsed.local or file.backend == LOCAL:
        return _serve(file)
    with _joined(file.name, parsed.address) as ray_backend:
        deployed = ray_backend.Deployed.begin(file, text, str(parsed.file), _new_secrets(file))
        try:
            status = _wait_ready(deployed.status, file.start_timeout_s)
        except BatonError:
            ray_backend.sweep(file.name)
            raise
    print(f"Baton ready at {' and '.join(status.addresses)}")
    print(f"baton cluster status --name {file.name}\nbaton cluster down --name {file.name}", flush=True)
    return 0


def _status(parsed: argparse.Namespace) -> int:
    with _joined(parsed.name, parsed.address) as ray_backend:
        status: Status = ray_backend.Deployed(parsed.name).status()
    print(status.as_json() if parsed.json else status.as_text())
    return 0


def _down(parsed: argparse.Namespace) -> int:
    with _joined(parsed.name, parsed.address) as ray_backend:
        try:
            is_over = _wait_over(ray_backend.Deployed(parsed.name), parsed.timeout_s)
        except InvalidSetting:  # no controller, but perhaps what it has left
            num_left = ray_backend.sweep(parsed.name)
            if not num_left:
                raise
            is_over = False
        else:
            num_left = ray_backend.sweep(parsed.name)
    if not is_over:
        print(f"not everything has finished: {num_left} programs were ended", file=sys.stderr)
    print(f"{parsed.name} is down")
    return 0 if is_over else 1


def _serve(file: ClusterFile) -> int:
    """The deployment on this machine, with each group at its count: there is nobody who would make it grow."""
    for role, group in file.groups.items():
        if group.minimum != group.maximum:
            print(f"{role}: {group.count} nodes; on one machine their number stays as it is", file=sys.stderr)
    return serve.run(file.on_one_machine(), {**os.environ, **file.environment})


@contextlib.contextmanager
def _joined(name: str, address: str) -> Iterator[ModuleType]:
    """The module that knows Ray, as a part of its cluster. Within, what is printed goes to stderr: Ray tells on stdout
    what it knows of machines and workers, whenever that is."""
    ray_backend = _load_ray()
    with contextlib.redirect_stdout(sys.stderr):
        ray_backend.connect(name, address)
        try:
            yield ray_backend
        finally:
            ray_backend.disconnect()


def _load_ray() -> ModuleType:
    try:
        from baton.launch.cluster import ray_backend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise InvalidSetting(
            "Ray is not installed: pip install 'baton-serve[ray]', here and on every machine"
        ) from None
    return ray_backend


def _new_secrets(file: ClusterFile) -> Secrets:
    """A cluster key for this deployment, and a key of the router for its controller where clients need one."""
    import zmq

    from baton.launch.cluster.keeper import Secrets

    _, cluster_key = zmq.curve_keypair()
    made = secrets.token_urlsafe(32) if file.router.api_key_file else ""
    return Secrets(f"{cluster_key.decode()}\n", os.environ.get(KEY_VARIABLE, "") or made)


def _wait_ready(ask: Callable[[], Status], timeout_s: float) -> Status:
    """The status once everything runs. Raises `BatonError` when a program cannot start, or after `timeout_s`."""
    deadline_s, said = time.monotonic() + timeout_s, Said()
    while True:
        status = ask()
        said.show(status.changes)
        if status.is_ready:
            return status
        for member in status.members:
            if member.num_failures >= _MAX_FAILURES:
                raise ChildFailed(f"{member.name}: {member.reason}")
        if time.monotonic() > deadline_s:
            waiting = [f"{member.name} ({member.reason or member.phase})" for member in status.members]
            raise ChildFailed(f"not ready after {timeout_s:g} s: {', '.join(waiting)}")
        time.sleep(_POLL_S)


class Stoppable(Protocol):
    """A controller that can be asked to take its deployment down."""

    def status(self) -> Status:
        """The state of the deployment."""
        ...

    def stop(self) -> None:
        """Take the deployment down."""
        ...


def _wait_over(deployed: Stoppable, timeout_s: float) -> bool:
    """Take it down; whether everything has ended within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    try:
        said = Said(deployed.status().changes)
        while time.monotonic() < deadline_s:
            deployed.stop()  # again and again: a later life of the controller has not heard it
            status = deployed.status()
            said.show(status.changes)
            if status.is_over:
                return True
            time.sleep(_POLL_S)
    except ChildFailed as error:
        print(f"{error}", file=sys.stderr)
    return False


class Said:
    """Shows each change once, on stderr, but for those that are `known`."""

    def __init__(self, known: Sequence[Note] = ()) -> None:
        self._known = set(known)

    def show(self, changes: Sequence[Note]) -> None:
        """Show those of `changes` that are new."""
        for note in changes:
            if note not in self._known:
                self._known.add(note)
                print(shown(note), file=sys.stderr, flush=True)
