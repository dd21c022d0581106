"""`python -m tests.walk`: through which files one plain request goes, and whether docs/architecture.md tells it right.

A router, a prefill node and a decode node serve a streamed `POST /v1/chat/completions` on a connection that has had one
before. A function counts when it is called for that request, and not while nothing happens: heartbeats are no part of a
request. A file counts with one of its functions; one that only holds values has none. The table of docs/architecture.md
has to name functions that count, in the order of their first calls within each thread; what it leaves out is listed.
Ends with status 1 when it does not.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.system.harness import MODEL_NAME, Program, wait_until
from tests.walk.stations import Station, stations
from tests.walk.traced import MARK

IDLE_S = 2.0
"""Longer than the periods of all that programs do without requests."""
ANSWER_S = 60.0
Function = tuple[str, str]
"""Its source and its name."""
Calls = Mapping[Function, str]
"""The functions that one program has called for the request, in order, and the thread that did so first."""


def main() -> int:
    """Print the walk; the exit status."""
    with tempfile.TemporaryDirectory() as name:
        walk = served(Path(name))
    told = {station.source for station in stations()}
    for program, calls in walk.items():
        files = list(dict.fromkeys(source for source, _ in calls))
        rooms = Counter(str(Path(source).parent) for source in files)
        _say(f"\n{program}: {len(files)} files ({', '.join(f'{room} {rooms[room]}' for room in sorted(rooms))})")
        for source in files:
            names = [name for where, name in calls if where == source and "<" not in name]
            _say(f"{'*' if source in told else ' '} {source:50} {', '.join(names[:4])}{', ...' * (len(names) > 4)}")
    wrong = faults(stations(), list(walk.values()))
    _say("\n" + ("\n".join(wrong) or f"the {len(told)} files of docs/architecture.md (*) are passed in their order"))
    return 1 if wrong else 0


def faults(told: Sequence[Station], programs: Sequence[Calls]) -> list[str]:
    """What is wrong with a walk as it is told."""
    found = [
        f"{station.function} of {station.source} is not called"
        for station in told
        if not any((station.source, station.function) in calls for calls in programs)
    ]
    for calls in programs:
        passed = [(each.source, each.function) for each in told if (each.source, each.function) in calls]
        order = list(calls)
        for thread in set(calls.values()):
            of_thread = [function for function in passed if calls[function] == thread]
            for before, after in pairwise(of_thread):
                if order.index(before) > order.index(after):
                    found.append(f"{after[1]} is called before {before[1]}")
    return found


def served(folder: Path) -> dict[str, Calls]:
    """Serve one request in `folder`; the calls that each program has made for it, in order."""
    checkpoint = str(make_checkpoint(folder / "tiny", "qwen3"))
    programs: list[Program] = []
    try:
        router = _start(programs, folder, "router", "baton.router", checkpoint, "--served-model-name", MODEL_NAME)
        for role in ("prefill", "decode"):
            flags = (checkpoint, "--router", router.ready["control_address"], "--num-threads", "1")
            _start(programs, folder, role, f"baton.{role}_node", *flags)
        client = http.client.HTTPConnection(router.address.removeprefix("http://"), timeout=ANSWER_S)
        _ask(client, "What has been served before? Something of the same kind.")
        for _ in range(2):
            _rest(folder, programs)
        _ask(client, "Which way does this go? Through all rooms of this house.")
        _rest(folder, programs)
    finally:
        for program in programs:
            program.kill()
    return {program.name: _calls(folder, program.name) for program in programs}


def _start(programs: list[Program], folder: Path, name: str, module: str, *flags: str) -> Program:
    command = ["-m", "tests.walk.traced", str(folder / f"{name}.calls"), module, *flags]
    program = Program(name, command, folder)
    programs.append(program)
    program.wait_ready()
    return program


def _ask(client: http.client.HTTPConnection, question: str) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": question}], "max_tokens": 8, "stream": True}
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse().read()
    if not answer.endswith(b"data: [DONE]\n\n"):
        raise AssertionError(f"the stream has not ended well: {answer!r}")


def _rest(folder: Path, programs: Sequence[Program]) -> None:
    """Let an idle time pass, and tell what was called before its end from what is called behind it."""
    time.sleep(IDLE_S)
    for program in programs:
        num_parts = len(_parts(folder, program.name))
        program.signal(signal.SIGUSR1)
        wait_until(lambda: len(_parts(folder, program.name)) > num_parts, "the program has a mark")  # noqa: B023


def _parts(folder: Path, program: str) -> list[str]:
    return (folder / f"{program}.calls").read_text().split(f"{MARK}\n")


def _calls(folder: Path, program: str) -> Calls:
    """Those of the last request that were not made without one."""
    _, idle, busy, _ = _parts(folder, program)
    known = {tuple(line.split()[1:]) for line in idle.splitlines()}
    calls = [line.split() for line in busy.splitlines()]
    return {(source, name): thread for thread, source, name in calls if (source, name) not in known}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
