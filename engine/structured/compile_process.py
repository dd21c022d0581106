"""Compiles grammars of clients to see whether they can be: a process of its own, which the kernel limits.

Reads one JSON object for each grammar from its standard input (`kind`, `text`) and answers each with a line: a JSON
object whose `error` says why the grammar cannot be compiled, "" when it can. The first line of its output says so of
the tokenizer. A grammar that takes too much time, memory or stack ends this process and nothing else. It ends by itself
with its input, and with an answer that says `is_last`, after a grammar that left much memory in use.

Its stack is half of that of a node's threads, so no grammar that passed here overflows theirs.

    python -m engine.structured.compile_process CHECKPOINT
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from engine.structured.vocabulary import Vocabulary
from engine.text.tokenizer import Tokenizer
from wire.errors import BatonError
from wire.grammar import Grammar

CPU_S = 1.5
MEMORY_BYTES = 256 * 2**20
_KEPT_BYTES = 64 * 2**20
_STACK_BYTES = 4 * 2**20


def main() -> int:
    """Answer until the input ends."""
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
        _answer(error.message, is_last=True)
        return
    _answer("")
    size = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        # processor time, so that a busy machine refuses no grammar; the signal's default action ends the process
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        found = _error_of(vocabulary, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = _address_space() - size > _KEPT_BYTES
        _answer(found, is_last)
        if is_last:
            return


def _error_of(vocabulary: Vocabulary, line: str) -> str:
    try:
        vocabulary.compile(Grammar(**json.loads(line)))
    except BatonError as error:
        return error.message
    except RecursionError:
        return "it is nested too deeply"
    except Exception as error:  # the outer edge: the library may raise anything
        return f"it cannot be compiled ({type(error).__name__})"
    return ""


def _answer(error: str, is_last: bool = False) -> None:
    sys.stdout.write(json.dumps({"error": error, "is_last": is_last}) + "\n")
    sys.stdout.flush()


def _address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
