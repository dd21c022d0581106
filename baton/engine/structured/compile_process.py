"""Compiles grammars of clients to see whether they can be: a process of its own, which the kernel limits.

Reads one JSON object for each grammar from its standard input (`kind`, `text`, and `parts`: grammars that clients wrote
and that it was made of) and answers each with a line: a JSON object whose `error` says why the grammar cannot be
compiled, "" when it can, `place` where in it, and `part` of which of the parts. The first line of its output says so of
the tokenizer. A grammar that takes too much time, memory or stack ends this process and nothing else. It ends by itself
with its input, and with an answer that says `is_last`, after a grammar that left much memory in use.

Its stack is half of that of a node's threads, so no grammar that passed here overflows theirs.

    python -m baton.engine.structured.compile_process CHECKPOINT
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from baton.engine.structured.vocabulary import Vocabulary, require_followable
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import BatonError, InvalidRequest
from baton.wire.grammar import Grammar

CPU_S = 1.5
MEMORY_BYTES = 256 * 2**20
_KEPT_BYTES = 64 * 2**20
_STACK_BYTES = 4 * 2**20


def main() -> int:
    """Compile one grammar after another until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Path(sys.argv[1]),))
    thread.start()
    thread.join()
    return 0


def _serve(folder: Path) -> None:
    try:
        vocabulary = Vocabulary.from_folder(folder, Tokenizer.from_folder(folder).eos_token_ids)
    except BatonError as error:
        _answer(Verdict(error.message), is_last=True)
        return
    _answer(SOUND)
    size = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        # processor time, so that a busy machine refuses no grammar; the signal's default action ends the process
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        found = _verdict_of(vocabulary, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = _address_space() - size > _KEPT_BYTES
        _answer(found, is_last)
        if is_last:
            return


class Verdict(NamedTuple):
    """`error`: "" for a grammar that can be compiled. `place`: where in it. `part`: of which of the parts, None for the
    whole."""

    error: str
    place: str = ""
    part: int | None = None


SOUND = Verdict("")


def _verdict_of(vocabulary: Vocabulary, line: str) -> Verdict:
    asked = json.loads(line)
    parts = [Grammar(**part) for part in asked["parts"]]
    for number, part in enumerate(parts):
        found = _verdict(require_followable, part)
        if found is not SOUND:
            return found._replace(part=number)
    found = _verdict(vocabulary.compile, Grammar(asked["kind"], asked["text"]))
    if found is SOUND or not parts:
        return found
    verdicts = (_verdict(vocabulary.compile, part)._replace(part=number) for number, part in enumerate(parts))
    return next((verdict for verdict in verdicts if verdict.error), found._replace(place=""))


def _verdict(look: Callable[[Grammar], object], grammar: Grammar) -> Verdict:
    try:
        look(grammar)
    except InvalidRequest as error:
        return Verdict(error.message, error.param or "")
    except RecursionError:
        return Verdict("it is nested too deeply")
    except Exception as error:  # the outer edge: the library may raise anything
        return Verdict(f"it cannot be compiled ({type(error).__name__})")
    return SOUND


def _answer(verdict: Verdict, is_last: bool = False) -> None:
    sys.stdout.write(json.dumps({**verdict._asdict(), "is_last": is_last}) + "\n")
    sys.stdout.flush()


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
