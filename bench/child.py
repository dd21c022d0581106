"""Processes that a benchmark measures: one command at a time over pipes, see `baton.runtime.child`, never left behind.

Owns the commands. A command and its answer are one line of JSON each. Whoever waits for an answer is blocked on a pipe,
so the process that asks takes no time from those that are measured. A child ends when its standard input does, however
its parent went, and tidies up.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from baton.runtime import child
from baton.wire.errors import BatonError, ChildFailed, RequestFailed

_ANSWER_S = 120.0
_LEAVE_S = 10.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Worker(Protocol):
    """What a child does: each of its public methods is a command, and what it returns is the answer."""

    def close(self) -> None: ...


class Child(child.Child):
    """Runs `python -m module`, which calls `serve_parent`, on core `cpu` (None: any). Context manager."""

    def __init__(self, module: str, spec: dict[str, Any], cpu: int | None = None) -> None:
        environment = {**_ONE_THREAD, **os.environ}
        super().__init__(module, environment=environment, stdin=child.PIPE, stdout=child.PIPE, outlives_parent=True)
        self._send({"cpu": cpu, "spec": spec})

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have a command carried out and return its answer. Raises `RequestFailed`."""
        self.tell(command, **arguments)
        return self.hear()

    def tell(self, command: str, **arguments: Any) -> None:
        """Have a command carried out; `hear` returns its answer. Raises `RequestFailed`."""
        self._send({"command": command, "arguments": arguments})

    def hear(self, timeout_s: float = _ANSWER_S) -> Any:
        """The next answer; the first one says that the child is ready. Raises `RequestFailed`."""
        try:
            answer = json.loads(self.read_line(timeout_s))
        except ChildFailed as error:
            raise RequestFailed(str(error)) from None
        if "failure" in answer:
            raise RequestFailed(answer["failure"])
        return answer["answer"]

    def close(self) -> None:
        """End it: by the end of its input, and by a signal when that takes too long."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.wait(_LEAVE_S)
        self.end()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.stdin.write(json.dumps(message).encode() + b"\n")
            self.stdin.flush()
        except (OSError, ValueError) as error:
            raise RequestFailed(f"{self.module} takes no commands: {error}") from None


def serve_parent(begin: Callable[[dict[str, Any]], Worker]) -> None:
    """A child's main program: build a worker from the spec, then carry out commands until the input ends."""
    commands, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like an answer
    order = json.loads(commands.readline())
    if order["cpu"] is not None:
        os.sched_setaffinity(0, {order["cpu"]})
    workers: list[Worker] = []
    try:
        _answer(answers, lambda: workers.append(begin(order["spec"])))
        while workers and (line := commands.readline()):
            told = json.loads(line)
            _answer(answers, getattr(workers[0], told["command"]), **told["arguments"])
    finally:
        for worker in workers:
            worker.close()


def _answer(descriptor: int, work: Callable[..., Any], **arguments: Any) -> None:
    try:
        answer = {"answer": work(**arguments)}
    except BatonError as error:
        answer = {"failure": str(error)}
    except Exception as error:  # whoever asked must not wait for an answer that never comes
        traceback.print_exc()
        answer = {"failure": f"{type(error).__name__}: {error}"}
    message = memoryview(json.dumps(answer).encode() + b"\n")
    with contextlib.suppress(BrokenPipeError):  # the parent has gone: so ends the input
        while message:
            message = message[os.write(descriptor, message) :]
