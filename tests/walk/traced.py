"""A program of Baton that notes which functions it calls: `python -m tests.walk.traced FILE MODULE FLAG...`.

A line in FILE for the first call of each function since the last SIGUSR1, which adds a line `MARK`: the thread, the
path of the source in the repository, and the function.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
MARK = "mark"


def main() -> None:
    """Run the module with a trace of all its threads."""
    _trace(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _trace(path: Path) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if (source := _source(code.co_filename)) is not None:
                os.write(file, f"{threading.get_native_id()} {source} {code.co_qualname}\n".encode())

    def mark(*_: object) -> None:
        os.write(file, f"{MARK}\n".encode())
        seen.clear()

    signal.signal(signal.SIGUSR1, mark)
    threading.setprofile(note)
    sys.setprofile(note)


@cache
def _source(filename: str) -> str | None:
    """Where it is in the repository, if it is of Baton itself."""
    path = Path(filename).resolve()
    if path.suffix != ".py" or not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "tests"):
        return None
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
