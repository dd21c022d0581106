"""Helpers: a supervisor in a process of its own, over fake children that behave as their arguments say."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0

FAKE_CHILD = """
import json, os, signal, subprocess, sys, time

name, behaviour, *rest = sys.argv[1:]
log = lambda text: print(text, file=sys.stderr, flush=True)
tell = lambda text: print(text, flush=True)  # arrives before the events that come after it

def stop(*_):
    log(f"{name} drains")
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else stop)
tell(f"{name} has pid {os.getpid()}")
if behaviour == "parent":
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    tell(f"sleeper has pid {sleeper.pid}")
if behaviour == "broken" or (behaviour == "breaks" and os.path.exists(rest[0])):
    log("error: no such model: llama-17")
    sys.exit(2)
if behaviour == "reloads":
    while rest and not os.path.exists(rest[0]):  # made by the test: until then SIGHUP would end this process
        time.sleep(0.01)
    signal.signal(signal.SIGHUP, lambda *_: log(f"{name} reloads"))
if behaviour == "killed":
    print(json.dumps({"event": "loading", "role": "prefill", "done": 5, "total": 2**31}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour != "mute":
    print(json.dumps({"event": "loading", "role": "prefill", "done": 5, "total": 10}), flush=True)
    print(json.dumps({"event": "ready", "role": "prefill", "address": f"http://{name}"}), flush=True)
if behaviour == "drained":
    while not os.path.exists(rest[0]):
        time.sleep(0.01)
    print(json.dumps({"event": "drained", "role": "decode"}), flush=True)
    sys.exit(0)
if behaviour in ("mayfly", "breaks"):
    while not os.path.exists(rest[0]):  # made by the test: a death before all are ready would end the start
        time.sleep(0.01)
    sys.exit(3)
time.sleep(100)
"""

DRIVER = """
import json, os, sys
import psutil
from baton.runtime.exit_status import report_errors
from baton.launch.supervised import ChildSpec
from baton.launch.console import Console
from baton.launch.supervisor import Supervisor

children, start_timeout_s, stop_timeout_s = json.loads(sys.argv[1])
specs = [
    ChildSpec(
        name,
        "fake_child",
        (name, *arguments),
        dict(os.environ),
        stops_last=name == "router",
        reloads=arguments[0] == "reloads",
        group=name.split("-")[0],
    )
    for name, *arguments in children
]
supervisor = Supervisor(
    specs,
    Console(sys.stderr),
    start_timeout_s=start_timeout_s,
    stop_timeout_s=stop_timeout_s,
    restart_delay_s=0.05,
    max_failures=4,
)
status = report_errors(
    lambda: supervisor.run(lambda addresses: print("all ready", json.dumps(addresses), flush=True))
)
if psutil.Process().children():  # the kernel would kill them now: a supervisor that relies on it is wrong
    print("left behind")
sys.exit(status)
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll, because a process that is not the parent gets no notice when a process ends."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {WAIT_S} s for {what}")
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not merely waiting to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class RunningSupervisor:
    """The process, and the file that collects its stdout and stderr."""

    process: subprocess.Popen[bytes]
    file: Path

    def output(self) -> str:
        return self.file.read_text()

    def wait_for(self, text: str, num_times: int = 1) -> None:
        wait_until(lambda: self.output().count(text) >= num_times, f"{text!r} in\n{self.output()}")

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def pids(self) -> list[int]:
        """Process ids that the children have told, oldest first."""
        return [int(pid) for pid in re.findall(r"has pid (\d+)", self.output())]

    def running_pids(self) -> list[int]:
        return [pid for pid in self.pids() if is_running(pid)]


Supervise = Callable[..., RunningSupervisor]
