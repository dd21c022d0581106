"""Helper: a member of a deployment that behaves as its first argument says, for tests of what runs members."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from baton.runtime.events import Ready, emit

LIFE_S = 300.0
"""It ends by itself, whatever becomes of its test."""


def main() -> None:
    """steady: ready at once; mute: never; stubborn: ready, and deaf to SIGTERM; broken: cannot start."""
    behaviour = sys.argv[1]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[2:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else _stop)
    if behaviour == "broken":
        sys.exit("error: no such model: llama-17")
    if "cluster-key" in flags:
        with open(flags["cluster-key"]) as file:
            sys.stderr.write(f"a key of {len(file.read().strip())} characters\n")
    if behaviour != "mute":
        emit(Ready("decode", f"http://{flags.get('host', 'nowhere')}:{os.getpid()}", "tcp://127.0.0.1:1"))
    time.sleep(LIFE_S)


def _stop(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
