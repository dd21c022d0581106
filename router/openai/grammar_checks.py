"""Finds out whether the grammar of a request can be compiled, before any node hears of it.

Owns the verdicts, which are kept, so a grammar costs something once. The processes that compile
(`engine.structured.compile_process`) are a `ChildPool`. Nothing here holds up the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

from router.child_pool import ChildPool
from wire.errors import ChildFailed, InvalidRequest, Overloaded
from wire.grammar import Grammar

MAX_AT_ONCE = 2
MAX_WAITING = 32
MAX_VERDICTS = 4096
_ANSWER_S = 10.0
_MODULE = "engine.structured.compile_process"
_TOO_MUCH = "compiling it takes more time or memory than a grammar may have"


class GrammarChecks:
    """Checks grammars with the tokenizer of the checkpoint in `folder`. Used by one event loop."""

    def __init__(self, folder: Path) -> None:
        self._compilers = ChildPool(
            _MODULE, str(folder), name="the process that checks grammars", max_at_once=MAX_AT_ONCE, answer_s=_ANSWER_S
        )
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[str]] = {}

    async def require(self, grammar: Grammar, param: str) -> None:
        """Raise `InvalidRequest` for `param`, with the reason, when `grammar` cannot be compiled, and `Overloaded` when
        too many are waiting or no process can be started."""
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
        self._compilers.close()

    def _begin(self, digest: bytes, grammar: Grammar) -> asyncio.Future[str]:
        running = self._running.get(digest)
        if running is not None:
            return running
        if len(self._running) >= MAX_WAITING:
            raise Overloaded("too many new grammars are being compiled", retry_after_s=2)
        found = self._compilers.run(self._check, grammar)
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
        """The error of `grammar`, "" when it has none. In a thread of the pool. Raises `Overloaded`."""
        try:
            return str(self._compilers.ask({"kind": grammar.kind, "text": grammar.text})["error"])
        except ChildFailed:
            return _TOO_MUCH
