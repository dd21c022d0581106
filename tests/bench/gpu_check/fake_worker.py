"""A measurement that does what tests of `GroupRun` want: `GROUP DEVICE QUICK NAME`. A program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from baton.bench.gpu_check.rows import missing_row, say, say_row, speed_row


def main(group: str, name: str) -> None:
    sys.stdout.write("what a library prints\n")
    if group == "machine":
        say({"missing": "--device cuda: there is none"})
        return
    if name != "nothing":
        say_row(speed_row(name, str(os.getpid()), 7.0, "ms"))
    match name:
        case "slow":
            say_row(speed_row(name, "", 9.0, "ms", bound=3.0, target=4.0))
        case "crash":
            os._exit(3)
        case "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", group])
            time.sleep(600)
        case "missing":
            say_row(missing_row(name, "", "nccl needs two GPUs"))
        case "garbage":
            say({"row": {"verdict": "splendid"}})
        case _:
            pass
    say({"done": True})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[4])
