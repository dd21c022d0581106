"""A program for tests of `baton.runtime.child`: behaves as its first argument says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from baton.runtime.child import PIPE, Child
from baton.runtime.events import Loading, Ready, emit

NAME = "tests.runtime.child_program"


def main(behaviour: str, *arguments: str) -> None:
    """Become that program."""
    match behaviour:
        case "says":
            say("".join(arguments))
        case "exits":
            sys.exit(int(arguments[0]))
        case "starts":
            say("a library says something\n")
            emit(Loading("decode", 1, 2))
            emit(Ready("decode", "http://there"))
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("ignores SIGTERM\n")
        case "parent":
            sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
            say(f"{sleeper.pid}\n")
        case "tidy":
            say(f"{os.getpid()}\n")
            sys.stdin.read()
            Path(arguments[0]).touch()
            return
        case "echoes":
            for line in sys.stdin:
                say(line)
        case "sleeps":
            say(f"{os.getpid()}\n")
            time.sleep(60)
        case "dies first":
            with Child(NAME, *arguments, stdin=PIPE, stdout=PIPE, outlives_parent=arguments[0] == "tidy") as child:
                say(child.read_line(30).decode() + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise ValueError(behaviour)
    sys.stdin.read()


def say(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
