"""A program for tests of `baton.router.http.child_pool`: answers with its id, and behaves as it is asked to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NAME = "tests.router.answering_program"


def main(first_error: str = "") -> None:
    """Answer until the input ends."""
    answer(first_error)
    for line in sys.stdin:
        match json.loads(line):
            case ["die"]:
                os._exit(1)
            case ["be silent", was_read]:
                Path(was_read).touch()
                sys.stdin.read()
            case asked:
                answer(is_last=asked == ["end"])


def answer(error: str = "", *, is_last: bool = False) -> None:
    """One line. With `is_last` the program does not end, as one would that had only said so."""
    sys.stdout.write(json.dumps({"error": error, "pid": os.getpid(), "is_last": is_last}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
