"""Finds out whether the grammar of a request can be compiled, before any node hears of it.

Owns the verdicts, which are kept, so a grammar costs something once. The processes that compile
(`baton.engine.structured.compile_process`) are a `ChildPool`. Nothing here holds up the event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from baton.router.http.child_pool import ChildPool
from baton.wire.errors import ChildFailed, InvalidRequest, Overloaded
from baton.wire.grammar import Grammar

MAX_AT_ONCE = 2
MAX_WAITING = 32
MAX_VERDICTS = 4096
_ANSWER_S = 10.0
_MODULE = "baton.engine.structured.compile_process"
_TOO_MUCH = "compiling it takes more time or memory than a grammar may have"


class _Verdict(NamedTuple):
    """`error`: "" for a grammar that can be compiled. `part`: the part at fault, None for the whole; `place` in it."""

    error: str
    place: str
    part: int | None


class GrammarChecks:
    """Checks grammars with the tokenizer of the checkpoint in `folder`. Used by one event loop."""

    def __init__(self, folder: Path) -> None:
        self._compilers = ChildPool(
            _MODULE, str(folder), name="the process that checks grammars", max_at_once=MAX_AT_ONCE, answer_s=_ANSWER_S
        )
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[_Verdict]] = {}

    async def require(self, grammar: Grammar, param: str, parts: Sequence[tuple[str, Grammar]] = ()) -> None:
        """Raise `InvalidRequest` with the reason when `grammar` cannot be compiled, and `Overloaded` when too many are
        waiting or no process can be started. `parts`: grammars of the client that it was made of, and the fields that
        they came with; the error names the field at fault, and the place in it, else `param`."""
        grammars = (grammar, *(part for _, part in parts))
        digest = blake2b("\n".join(f"{each.kind}\n{each.text}" for each in grammars).encode(), digest_size=16).digest()
        found = self._verdicts.get(digest)
        if found is None:
            found = await asyncio.shield(self._begin(digest, grammars))
        else:
            self._verdicts.move_to_end(digest)
        if found.error:
            at = (param if found.part is None else parts[found.part][0]) + found.place
            raise InvalidRequest(f"{at} cannot be served: {found.error}", at)

    def start(self) -> None:
        """Start the threads that wait for the processes."""
        self._compilers.start()

    def close(self) -> None:
        """End the processes."""
        self._compilers.close()

    def _begin(self, digest: bytes, grammars: Sequence[Grammar]) -> asyncio.Future[_Verdict]:
        running = self._running.get(digest)
        if running is not None:
            return running
        if len(self._running) >= MAX_WAITING:
            raise Overloaded("too many new grammars are being compiled", retry_after_s=2)
        found = self._compilers.run(self._check, grammars)
        self._running[digest] = found
        found.add_done_callback(lambda done: self._ended(digest, done))
        return found

    def _ended(self, digest: bytes, done: asyncio.Future[_Verdict]) -> None:
        del self._running[digest]
        if not done.cancelled() and done.exception() is None:
            self._verdicts[digest] = done.result()
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)

    def _check(self, grammars: Sequence[Grammar]) -> _Verdict:
        """What is to be said of the first of `grammars`, which was made of the others. In a thread of the pool. Raises
        `Overloaded`."""
        whole, *parts = ({"kind": grammar.kind, "text": grammar.text} for grammar in grammars)
        try:
            answer = self._compilers.ask({**whole, "parts": parts})
        except ChildFailed:
            return _Verdict(_TOO_MUCH, "", None)
        return _Verdict(answer["error"], answer["place"], answer["part"])
