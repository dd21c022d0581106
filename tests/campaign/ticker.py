"""A process that works a little and waits a little, as a node does, and tells how much longer that took than it should.

`python -I -S ticker.py`: until its standard input ends, five lines a second: a moment (`time.monotonic()`), and how
many seconds of the time since the last line were lost to others. Standard library only.
"""

from __future__ import annotations

import select
import sys
import time

_WORK_S, _WAIT_S, _TELL_S = 0.001, 0.014, 0.2


def main() -> None:
    """Tick until nobody listens."""
    told_s, lost_s = time.monotonic(), 0.0
    while True:
        begun_s, worked_s = time.monotonic(), time.thread_time()
        while time.thread_time() - worked_s < _WORK_S:
            pass
        if select.select([0], [], [], _WAIT_S)[0]:
            return
        now_s = time.monotonic()
        lost_s += max(0.0, now_s - begun_s - _WORK_S - _WAIT_S)
        if now_s - told_s >= _TELL_S:
            sys.stdout.write(f"{now_s:.6f} {lost_s:.6f}\n")
            sys.stdout.flush()
            told_s, lost_s = now_s, 0.0


if __name__ == "__main__":
    main()
