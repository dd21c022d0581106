"""`python -m tests.clients`: real clients against a real relay, unmodified. Exit status 1 when one of them fails.

Starts `baton serve` with the demo model, or takes a running server by --url. Runs the libraries that this interpreter
can import, and the recorded requests of clients that are no libraries. The libraries may live in an environment of
their own: --server-python names the interpreter that has Baton.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.clients.libraries import LIBRARIES
from tests.clients.recorded import MODEL, RECORDED, Recorded

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 60.0
PASSED, FAILED, ABSENT = "passed", "FAILED", "not installed"
READY = "Baton ready at "


def main() -> int:
    """Run all and print one line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter that has Baton")
    flags = parser.parse_args()
    with contextlib.nullcontext(flags.url) if flags.url else _relay(flags.server_python) as url:
        model = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
        runs: dict[str, Callable[[], None]] = {}
        for name, use in LIBRARIES.items():
            runs[name] = lambda use=use: use(f"{url}/v1", model)  # type: ignore[misc]
        for recorded in RECORDED:
            runs[f"recorded: {recorded.client}"] = lambda sent=recorded: _replay(url, model, sent)  # type: ignore[misc]
        results = [_run(name, run) for name, run in runs.items()]
    return 1 if FAILED in results else 0


@contextlib.contextmanager
def _relay(python: str) -> Iterator[str]:
    command = [python, "-m", "baton", "serve", "--device=cpu", "--port=0"]
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
    except ImportError as error:
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
