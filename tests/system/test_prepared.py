"""The process that forks for tests: what is left of it when its owner exits, and that it does what execnet asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.system.harness import wait_until
from tests.system.prepared import ROOT

OWNER = """
import os, sys
from tests.system.prepared import prepared_python

python = prepared_python("json")
with open(os.devnull, "wb") as nothing:
    print(python.start([sys.argv[1]], dict(os.environ), nothing, nothing).wait(60.0))
"""
STARTER = """
import json, sys
from types import SimpleNamespace
import execnet
from tests.system.prepared import fork_workers

spec = SimpleNamespace(id="gw0")
fork_workers([spec], ["xml.dom"])
worker = execnet.makegateway(f"popen//python={spec.python}//id=gw0//execmodel=main_thread_only")
channel = worker.remote_exec(sys.argv[1])
channel.send(sys.argv[2:])
print(json.dumps(channel.receive()))
execnet.default_group.terminate(60.0)
"""
WORKER = """
import os, sys
from tests.system.prepared import prepared_python

short, long = channel.receive()
python = prepared_python("xml.dom")
with open(os.devnull, "wb") as nothing:
    late = python.start([long], {}, nothing, nothing)
    status = python.start([short], {}, nothing, nothing).wait(60.0)
channel.send(("xml.dom" in sys.modules, os.environ["TOLD"], status, late.pid, os.getpid(), os.getppid()))
"""


def run(source: str, *arguments: str) -> tuple[str, str]:
    """What it has said and complained of as a process of its own, that is not told of another which forks."""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", source, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOLD": "yes"}
    environment.pop("BATON_TEST_PREPARED", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def program(folder: Path, source: str) -> str:
    """The path of a program."""
    path = folder / f"program{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    return str(path)


def has_ended(pid: int) -> bool:
    """Whether it is gone, or nobody has asked for its exit status yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_nothing_is_left_to_the_garbage_collector_when_the_owner_exits(tmp_path: Path) -> None:
    assert run(OWNER, program(tmp_path, "raise SystemExit(3)")) == ("3\n", "")


def test_a_process_that_runs_tests_has_the_imports_and_shares_what_forks_and_all_end(tmp_path: Path) -> None:
    programs = program(tmp_path, "raise SystemExit(3)"), program(tmp_path, "import time; time.sleep(100)")
    said, complaints = run(STARTER, WORKER, *programs)
    assert complaints == ""
    *found, late, worker, forks = json.loads(said)
    assert found == [True, "yes", 3]
    wait_until(lambda: all(map(has_ended, (late, worker, forks))), "all have ended")
