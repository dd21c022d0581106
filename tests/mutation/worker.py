"""A process that has imported what tests import and nothing of Baton, and forks: each fork runs some tests once.

It runs in the copy whose files are changed; see `tests.mutation.copy`. Reads a JSON object from each line of standard
input, and answers with one. It needs Linux.

Invariants: a fork and all that it started have ended before the answer is given, in time or not; its memory is limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.campaign.private_shm import mount
from tests.mutation.traced import Chosen, Tracing

_PR_SET_CHILD_SUBREAPER = 36
_MAX_MEMORY_BYTES = 8 * 2**30
_ANSWER_BYTES = 2**16
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def main() -> None:
    """Answer until standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mount()
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        if "imports" in request:
            _import_all(request["imports"])
            answer = {"outcome": "passed"}
        else:
            answer = _in_fork(request)
        print(json.dumps(answer), flush=True)  # noqa: T201


def _import_all(modules: list[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # some cannot be imported by themselves; tests will import those
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _in_fork(request: dict[str, Any]) -> dict[str, str]:
    """Run tests; how that ended, and the first that failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_run(request)).encode())
        except BaseException:
            traceback.print_exc()  # into the log
        finally:
            os._exit(0)
    os.close(writing)
    readable, _, _ = select.select([reading], [], [], request["timeout_s"])
    answer = os.read(reading, _ANSWER_BYTES) if readable else b""
    os.close(reading)
    _end_children()
    if not readable:
        return {"outcome": "timeout"}
    result: dict[str, str] = json.loads(answer) if answer else {"outcome": "crashed"}
    return result


def _run(request: dict[str, Any]) -> dict[str, str]:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "trace" in request:
        return _trace(request)
    chosen = Chosen(request["tests"])
    status = pytest.main([*_OPTIONS, "-o", f"timeout={request['test_timeout_s']}", *request["files"]], [chosen])
    is_red = chosen.first_failed or status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    outcome = "timeout" if chosen.has_hung else "failed" if is_red else "passed" if chosen.num_found else "nothing ran"
    return {"outcome": outcome, "test": chosen.first_failed}


def _trace(request: dict[str, Any]) -> dict[str, str]:
    root = Path.cwd()
    tracing = Tracing(root, request["trace"])
    pytest.main([*_OPTIONS[1:], "-o", "timeout=0", *request["tests"]], [tracing])
    ours = tuple(f"{root}/{folder}" for folder in os.listdir(root))
    known = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    tracing.traced.modules = [name for name, file in known if file is not None and not file.startswith(ours)]
    Path(request["to"]).write_text(json.dumps(asdict(tracing.traced)))
    return {"outcome": "passed"}


def _end_children() -> None:
    """Kill and reap all that this process has below it, also what comes to it when its parent ends."""
    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.001)


if __name__ == "__main__":
    main()
