"""`python -m tests.walk`: the files through which one plain request goes, in the order in which it reaches them.

A file counts when one of its functions is called for a streamed `POST /v1/chat/completions` on a relay of a router, a
prefill node and a decode node that has served one before, and not while nothing happens: heartbeats are no part of a
request. Files that only hold values, which have no function of their own, do not count.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.system.harness import MODEL_NAME, Program, wait_until
from tests.walk.traced import MARK

IDLE_S = 2.0
"""Longer than the periods of all that programs do without requests."""
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function for a request."""

    at_ns: int
    program: str
    source: str
    function: str


def main() -> None:
    """Print the walk."""
    with tempfile.TemporaryDirectory() as name:
        calls = walk(Path(name), Path(name) / "tiny")
    for program in dict.fromkeys(call.program for call in calls):
        _print_program(program, [call for call in calls if call.program == program])


def _print_program(program: str, calls: list[Call]) -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        files[call.source].append(call.function)
    by_room: dict[str, int] = defaultdict(int)
    for source in files:
        by_room[str(Path(source).parent)] += 1
    print(f"\n{program}: {len(files)} files")
    for source, functions in files.items():
        shown = functions if "-v" in sys.argv else functions[:3]
        print(f"  {source:56} {', '.join(shown)}{'' if len(shown) == len(functions) else ', ...'}")
    print("  by room: " + ", ".join(f"{room} {number}" for room, number in sorted(by_room.items())))


def walk(folder: Path, checkpoint: Path) -> list[Call]:
    """Serve one request in `folder`; the calls of all programs that were made for it, in order."""
    make_checkpoint(checkpoint, "qwen3")
    programs: list[Program] = []
    try:
        router = _start(programs, folder, "router", "baton.router", str(checkpoint), "--served-model-name", MODEL_NAME)
        for role in ("prefill", "decode"):
            flags = (str(checkpoint), "--router", router.ready["control_address"], "--num-threads", "1")
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
    return sorted((call for each in programs for call in _calls(folder, each.name)), key=lambda call: call.at_ns)


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
    assert answer.endswith(b"data: [DONE]\n\n"), answer


def _rest(folder: Path, programs: list[Program]) -> None:
    """Tell apart what was called up to the end of an idle time, and what is called behind it."""
    time.sleep(IDLE_S)
    for program in programs:
        num_marks = len(_parts(folder, program.name))
        program.signal(signal.SIGUSR1)
        wait_until(lambda: len(_parts(folder, program.name)) > num_marks, f"{program.name} has a mark")  # noqa: B023


def _parts(folder: Path, program: str) -> list[str]:
    return (folder / f"{program}.calls").read_text().split(f"{MARK}\n")


def _calls(folder: Path, program: str) -> list[Call]:
    """Those of the last request that were not made without one."""
    _, idle, busy, _ = _parts(folder, program)
    calls = [Call(int(at), program, source, function) for at, source, function in map(str.split, busy.splitlines())]
    known = {tuple(line.split()[1:]) for line in idle.splitlines()}
    return [call for call in calls if (call.source, call.function) not in known]


if __name__ == "__main__":
    main()
