"""Ends its parent when the Python interpreter of that program stands still: a process of its own, stdlib only.

`python -I -S interpreter_watchdog.py PID THREAD_ID LIMIT_S`, started by `baton.runtime.watchdog`, whose thread writes a
byte to this process's standard input each time it looks. A thread that hangs in native code and holds the interpreter's
lock lets nothing of Python run there, the watchdog least of all: then no byte comes.

Not every silence is that. A program that is stopped, or that gets no processor, is silent too, and goes on later. What
tells them apart: a thread that waits for the interpreter's lock wakes every 5 ms to ask for it, and one of a program
that does not run never wakes. So a second counts when nothing came and the watchdog's thread has blocked `_WAKES_PER_S`
times. Seconds are counted and not measured: this process may have stood still as well.

After LIMIT_S such seconds in a row it says so on standard error, and sends SIGABRT: `faulthandler`, which needs no
lock, writes where each thread stands, and the program ends. If it does not, SIGKILL follows.
"""

from __future__ import annotations

import os
import select
import sys
import time

LOOK_S = 1.0
ABORT_S = 5.0
_WAKES_PER_S = 20
_LEAST_LOOKS = 4
_READ_BYTES = 4096
_ABORT, _KILL = 6, 9
"""Signals, by number: importing their names takes longer than all else that this program does at its start."""
_FIELD = "voluntary_ctxt_switches:"


def num_blocked(pid: int, thread_id: int) -> int:
    """How often the thread has given its processor up by itself. Raises `OSError` when it is gone."""
    with open(f"/proc/{pid}/task/{thread_id}/status") as file:
        return next(int(line.removeprefix(_FIELD)) for line in file if line.startswith(_FIELD))


def wait_for_standstill(pid: int, thread_id: int, limit_s: float) -> bool:
    """Whether the interpreter has stood still for so long; False when the program has ended, or says that it does."""
    look_s = min(LOOK_S, limit_s / _LEAST_LOOKS)
    still_s, num_before = 0.0, num_blocked(pid, thread_id)
    while still_s < limit_s:
        is_heard = bool(select.select([0], [], [], look_s)[0])
        if is_heard and not os.read(0, _READ_BYTES):
            return False
        num_now = num_blocked(pid, thread_id)
        waits = num_now - num_before >= _WAKES_PER_S * look_s
        still_s, num_before = 0.0 if is_heard else still_s + look_s * waits, num_now
    return os.getppid() == pid


def end(pid: int, limit_s: float) -> None:
    """End the program, whose process is the parent of this one."""
    sys.stderr.write(
        f"critical: nothing of Python has run in process {pid} for {limit_s:g} s, because a thread holds the "
        "interpreter's lock: the process is ended, and says where its threads are\n"
    )
    os.kill(pid, _ABORT)
    deadline_s = time.monotonic() + ABORT_S
    while os.getppid() == pid:
        if time.monotonic() > deadline_s:
            os.kill(pid, _KILL)
            return
        time.sleep(0.05)


def main() -> None:
    """Watch until the parent has ended."""
    pid, thread_id, limit_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        if wait_for_standstill(pid, thread_id, limit_s):
            end(pid, limit_s)
    except OSError:
        pass  # it ended while it was looked at


if __name__ == "__main__":
    main()
