"""Finds out whether the grammar of a request can be compiled, before any node hears of it.

Owns the processes that compile (`engine.structured.compile_process`): they are started with the first grammar, one is
replaced when a grammar has ended it, and none is left after `close`. Verdicts are kept, so a grammar costs something
once. Nothing here holds up the event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from program.child import NOTHING, PIPE, Child
from wire.errors import ChildFailed, InvalidRequest, Overloaded
from wire.grammar import Grammar

MAX_AT_ONCE = 2
MAX_WAITING = 32
MAX_VERDICTS = 4096
_START_S = 60.0
_ANSWER_S = 10.0
_TOO_MUCH = "compiling it takes more time or memory than a grammar may have"


class GrammarChecks:
    """Checks grammars with the tokenizer of the checkpoint in `folder`. Used by one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[str]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._idle: list[Child] = []
        self._lock = threading.Lock()
        self._is_closed = False

    async def require(self, grammar: Grammar, param: str) -> None:
        """Raise `InvalidRequest` for `param`, with the reason, when `grammar` cannot be compiled, and `Overloaded` when
        too many are waiting."""
        digest = blake2b(f"{grammar.kind}\n{grammar.text}".encode(), digest_size=16).digest()
        error = self._verdicts.get(digest)
        if error is None:
            error = await asyncio.shield(self._begin(digest, grammar))
        else:
            self._verdicts.move_to_end(digest)
        if error:
            raise InvalidRequest(f"{param} cannot be served: {error}", param)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            children, self._idle = self._idle, []
        for child in children:
            child.end()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _begin(self, digest: bytes, grammar: Grammar) -> asyncio.Future[str]:
        running = self._running.get(digest)
        if running is not None:
            return running
        if len(self._running) >= MAX_WAITING:
            raise Overloaded("too many new grammars are being compiled", retry_after_s=2)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_AT_ONCE, "grammar checks")
        found = asyncio.get_running_loop().run_in_executor(self._threads, self._check, grammar)
        self._running[digest] = found
        found.add_done_callback(lambda done: self._ended(digest, done))
        return found

    def _ended(self, digest: bytes, done: asyncio.Future[str]) -> None:
        del self._running[digest]
        if not done.cancelled() and done.exception() is None:
            self._verdicts[digest] = done.result()
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _check(self, grammar: Grammar) -> str:
        """The error of `grammar`, "" when it has none. In a thread, in which the process that it starts lives on."""
        question = json.dumps({"kind": grammar.kind, "text": grammar.text}).encode() + b"\n"
        child = self._take(question) or self._start(question)
        try:
            answer = _read_answer(child, _ANSWER_S)
        except ChildFailed:
            child.end()
            return _TOO_MUCH
        self._give_back(child, is_last=answer.is_last)
        return answer.error

    def _start(self, question: bytes) -> Child:
        """A new process that was asked the question. Raises `InvalidRequest` for a tokenizer without grammars."""
        child = Child("engine.structured.compile_process", str(self._folder), stdin=PIPE, stdout=PIPE, stderr=NOTHING)
        try:
            begun = _read_answer(child, _START_S)
            if begun.error:
                raise InvalidRequest(begun.error, "grammar")
            _ask(child, question)
        except BaseException:
            child.end()
            raise
        return child

    def _take(self, question: bytes) -> Child | None:
        """An idle process that was asked the question; None when there is none that lives."""
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None:
                return None
            try:
                _ask(child, question)
            except OSError:
                child.end()
            else:
                return child

    def _give_back(self, child: Child, *, is_last: bool) -> None:
        with self._lock:
            if not (self._is_closed or is_last):
                self._idle.append(child)
                return
        child.end()


class _Answer(NamedTuple):
    """`is_last`: the process ends after it."""

    error: str
    is_last: bool


def _ask(child: Child, question: bytes) -> None:
    child.stdin.write(question)
    child.stdin.flush()


def _read_answer(child: Child, timeout_s: float) -> _Answer:
    answer = json.loads(child.read_line(timeout_s))
    return _Answer(answer["error"], answer["is_last"])
