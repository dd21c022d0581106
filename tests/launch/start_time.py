"""What a start of `baton serve` takes: `python -m tests.launch.start_time [MODEL] [--rounds N] [FLAG ...]`.

Starts it again and again with these flags, asks for one token, and prints the seconds from the command to each line of
its nodes, to "ready" and to that token; then the processor seconds of each program up to there. On a busy machine those
say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import IO

import psutil

_PATIENCE_S = 600.0
_READY = re.compile(r"Baton ready at (\S+)")
_NODE_LINE = re.compile(r"\[([\w-]+)\] (load(?:ing|ed) [^:]*)$")
_PROGRAM = re.compile(r"baton\.(router|node|prefill_node|decode_node)")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    arguments, flags = parser.parse_known_args()
    for _ in range(arguments.rounds):
        run_once(flags)


def run_once(flags: Sequence[str]) -> None:
    """One start, and its end."""
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "baton", "serve", *flags, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        lines: queue.Queue[str] = queue.Queue()
        for stream in (serve.stdout, serve.stderr):
            threading.Thread(target=pass_on, args=(stream, lines), daemon=True).start()
        try:
            url = wait_ready(lines, begun_s)
            say(begun_s, "ready")
            ask(url)
            say(begun_s, f"first token; load {os.getloadavg()[0]:.1f}")
            print_cpu_seconds(psutil.Process(serve.pid))
        finally:
            serve.send_signal(signal.SIGINT)


def pass_on(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Put the lines of a stream, and "" at its end."""
    for line in stream:
        lines.put(line.rstrip())
    lines.put("")


def wait_ready(lines: queue.Queue[str], begun_s: float) -> str:
    """The address, once all programs are ready. Raises `RuntimeError` when it does not come to that."""
    said = []
    while line := lines.get(timeout=_PATIENCE_S):
        said.append(line)
        if found := _READY.match(line):
            return found[1]
        if found := _NODE_LINE.match(line):
            say(begun_s, f"{found[1]}: {found[2]}")
    raise RuntimeError("\n".join(said))


def ask(url: str) -> None:
    """Ask for one token."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=_PATIENCE_S) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        answer.read()


def print_cpu_seconds(serve: psutil.Process) -> None:
    """Those of the launcher, and of each program that it has started, with what that has forked."""
    for process in (serve, *serve.children()):
        family = [process] if process is serve else [process, *process.children(recursive=True)]
        times = [each.cpu_times() for each in family]
        found = _PROGRAM.search(" ".join(process.cmdline()))
        name = "launcher" if found is None else found[1]
        user_s, system_s = sum(each.user for each in times), sum(each.system for each in times)
        sys.stdout.write(f"{name}: {user_s + system_s:.2f} s of processor time, {system_s:.2f} of them the system's\n")


def say(begun_s: float, what: str) -> None:
    """Print what has just happened."""
    sys.stdout.write(f"{time.monotonic() - begun_s:7.2f} s  {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
