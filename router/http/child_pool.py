"""Child processes that answer questions about what clients send, so that no client's bytes are parsed in the router.

Owns the processes and the threads that wait for them. A process is started when a question finds none idle, answers one
after another, and is replaced when a question has ended it. Questions and answers are JSON objects or lists, one to a
line; every answer has an `error`, "" when there is none, and says with `is_last` that the process ends behind it. The
first line of a process is an answer too: with an error it can answer nothing, and ends. Does not know what is asked.

Invariants: every wait for a process has a deadline, those for one that does not read as well. A process is asked by one
thread at a time, and lives in a thread that the pool keeps, because the kernel ends it with that thread. A process that
was late or broke off is ended before its thread goes on; none is left after `close`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from baton.runtime.child import NOTHING, PIPE, Child
from baton.runtime.threads import StartedThreads
from baton.wire.errors import ChildFailed, Overloaded

_Found = TypeVar("_Found")
_START_S = 60.0
_log = logging.getLogger(__name__)


class ChildPool:
    """At most `max_at_once` processes `python -m module *arguments`, which `name` names in logs and errors; a question
    has to be read within `answer_s`, and answered within as much again. Used by one event loop."""

    def __init__(self, module: str, *arguments: str, name: str, max_at_once: int, answer_s: float) -> None:
        self._command = (module, *arguments)
        self._cannot_start = f"the router cannot start {name} now"
        self._threads = StartedThreads(max_at_once, name)
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._all: set[Child] = set()
        self._idle: list[Child] = []
        self._is_closed = False

    def start(self) -> None:
        """Start the threads. No process is started yet."""
        self._threads.start()

    def run(self, work: Callable[..., _Found], *arguments: object) -> asyncio.Future[_Found]:
        """Call `work(*arguments)`, which may `ask`, in a thread of the pool."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def ask(self, question: object) -> dict[str, Any]:
        """The answer of a process. In a thread of the pool.

        Raises `ChildFailed` when the process ended instead, or took too long, and `Overloaded` when none could be
        started.
        """
        line = json.dumps(question).encode() + b"\n"
        while (idle := self._taken()) is not None:
            try:
                idle.write(line, self._answer_s)
            except ChildFailed:
                self._end(idle)  # it has died since, or reads nothing: nothing was asked yet
            else:
                return self._answer_of(idle)
        child = self._started()
        try:
            begun = json.loads(child.read_line(_START_S))
            if begun["error"]:
                self._end(child)
                return dict(begun)
            child.write(line, self._answer_s)
        except ChildFailed as error:
            self._end(child)
            raise self._refused(error.message) from None
        return self._answer_of(child)

    def close(self) -> None:
        """End the processes. Questions that are being answered fail."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            children = list(self._all)
        for child in children:
            child.kill()  # whoever waits for an answer of it, or else the next line, ends it
        self._threads.shutdown(cancel_futures=True)
        for child in list(self._all):
            self._end(child)

    def _started(self) -> Child:
        """A new process."""
        try:
            child = Child(*self._command, stdin=PIPE, stdout=PIPE, stderr=NOTHING)
        except OSError as error:
            raise self._refused(error.strerror) from None
        with self._lock:
            self._all.add(child)
            is_late = self._is_closed
        if is_late:
            self._end(child)
            raise Overloaded(self._cannot_start)
        return child

    def _refused(self, reason: str | None) -> Overloaded:
        _log.warning("%s: %s", self._cannot_start, reason)
        return Overloaded(self._cannot_start, retry_after_s=2)

    def _taken(self) -> Child | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _answer_of(self, child: Child) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(child.read_line(self._answer_s))
        except ChildFailed:
            self._end(child)
            raise
        with self._lock:
            is_kept = not (self._is_closed or answer["is_last"])
            if is_kept:
                self._idle.append(child)
        if not is_kept:
            self._end(child)
        return answer

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._all.discard(child)
