"""How long clients of `baton serve` wait when the router dies: `python -m tests.launch.restart_time`.

Kills the life of the router, or with `--whole` the process that forks it too, and asks. Prints the seconds from the
SIGKILL to the first answer of the next router and to the first completion, and the memory of both processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import psutil

_ROUNDS = 4
_PAUSE_S = 3.0


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--whole", action="store_true", help="kill the process that forks lives too")
    whole = parser.parse_args().whole
    command = [sys.executable, "-m", "baton", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serve:
        try:
            assert serve.stdout is not None
            said = iter(serve.stdout.readline, "")
            url = next(line for line in said if line.startswith("Baton ready at ")).split()[-1]
            complete(url)
            for _ in range(_ROUNDS):
                kill_and_ask(serve.pid, url, whole=whole)
                time.sleep(_PAUSE_S)
        finally:
            serve.send_signal(signal.SIGINT)


def kill_and_ask(serve_pid: int, url: str, *, whole: bool) -> None:
    """One round."""
    router = next(child for child in psutil.Process(serve_pid).children() if "router" in child.cmdline())
    (life,) = router.children()
    memory = [f"{process.memory_full_info().uss / 1e6:.0f}" for process in (router, life)]
    victim = router if whole else life
    begun_s = time.monotonic()
    victim.kill()
    psutil.wait_procs([victim, life])
    with urllib.request.urlopen(f"{url}/live", timeout=60) as answer:
        answer.read()
    answered_s = time.monotonic()
    complete(url)
    sys.stdout.write(
        f"answered after {answered_s - begun_s:.2f} s, completed after {time.monotonic() - begun_s:.2f} s; load "
        f"{os.getloadavg()[0]:.1f}, MB of their own: {' and '.join(memory)}\n"
    )
    sys.stdout.flush()


def complete(url: str) -> None:
    """Ask for two tokens."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


if __name__ == "__main__":
    main()
