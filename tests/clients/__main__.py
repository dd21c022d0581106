"""`python -m tests.clients`: real clients against a real relay, unmodified. Exit status 1 when one of them fails.

Starts `baton serve` with the demo model, or takes a running server by --url. Runs the libraries that this interpreter
can import, the programs that are on PATH or named by --program, and the recorded requests of clients that are neither.
Where the server has the demo model, the libraries also run agents, which call functions until they have an answer.
Coding agents, which are programs too, have a server of their own (`coding_agents.py`).
All of them may live in environments of their own: --server-python names the interpreter that has Baton.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from baton.demo.location import checkpoint_path
from tests.clients.agents import AGENTS
from tests.clients.coding_agents import CODING_AGENTS, run_coding_agent
from tests.clients.libraries import LIBRARIES
from tests.clients.programs import PROGRAMS, NotInstalled, run_program
from tests.clients.recorded import MODEL, RECORDED, Recorded

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 60.0
PASSED, FAILED, ABSENT = "passed", "FAILED", "not installed"
DEMO_MODEL = "baton-demo"
READY = "Baton ready at "


def main() -> int:
    """Run all and print one line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter that has Baton")
    parser.add_argument("--tokenizer", default=checkpoint_path(), help="folder of the model's tokenizer, for programs")
    parser.add_argument("--program", action="append", default=[], type=_named_program, metavar="NAME=PATH")
    parser.add_argument("--only", default="", help="run those with this text in their name")
    flags = parser.parse_args()
    executables = {program.command: program.command for program in (*PROGRAMS, *CODING_AGENTS)} | dict(flags.program)
    with contextlib.nullcontext(flags.url) if flags.url else _relay(flags.server_python) as url:
        model = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
        runs: dict[str, Callable[[], None]] = {}
        for name, use in LIBRARIES.items():
            runs[name] = lambda use=use: use(f"{url}/v1", model)  # type: ignore[misc]
        for name, agent in AGENTS.items() if model == DEMO_MODEL else ():
            runs[name] = partial(agent, url, model)
        for recorded in RECORDED:
            runs[f"recorded: {recorded.client}"] = lambda sent=recorded: _replay(url, model, sent)  # type: ignore[misc]
        filled_in = {"url": url, "model": model, "tokenizer": str(flags.tokenizer)}
        for program in PROGRAMS:
            runs[program.name] = partial(run_program, program, executables[program.command], filled_in)
        for coding in CODING_AGENTS:
            runs[f"coding agent: {coding.command}"] = partial(
                run_coding_agent, coding, executables[coding.command], flags.server_python
            )
        results = [_run(name, run) for name, run in runs.items() if flags.only in name]
    return 1 if FAILED in results else 0


def _named_program(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in {program.command for program in (*PROGRAMS, *CODING_AGENTS)} or shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"{text}: not the name of a program with the path of an executable")
    return name, path


@contextlib.contextmanager
def _relay(python: str) -> Iterator[str]:
    command = [python, "-m", "baton", "serve", "--device=cpu", "--prefill=1", "--port=0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        # the server itself gives up after --start-timeout-s, and its end closes the pipe
        ready = next((line for line in process.stdout if line.startswith(READY)), None)
        if ready is None:
            raise SystemExit("the server did not start")
        yield ready.removeprefix(READY).strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(START_TIMEOUT_S)


def _run(name: str, run: Callable[[], None]) -> str:
    began_s = time.monotonic()
    detail = ""
    try:
        run()
        result = PASSED
    except (ImportError, NotInstalled) as error:
        result, detail = ABSENT, str(error)
    except Exception as error:  # each client has errors of its own; the next one runs all the same
        result, detail = FAILED, f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{result:<14}{name:<34}{time.monotonic() - began_s:6.1f} s  {detail:.400}\n")
    sys.stdout.flush()
    return result


def _replay(url: str, model: str, recorded: Recorded) -> None:
    body = json.dumps(recorded.body).replace(MODEL, model).encode()
    request = urllib.request.Request(url + recorded.path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer = response.read()
    except urllib.error.HTTPError as error:
        raise ValueError(f"{error.code}: {error.read().decode()}") from None
    if recorded.body.get("stream") and not answer.endswith(b"data: [DONE]\n\n"):
        raise ValueError("the stream has no end")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=REQUEST_TIMEOUT_S) as response:
        found: bytes = response.read()
    return found


if __name__ == "__main__":
    sys.exit(main())
