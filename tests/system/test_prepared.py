"""The process that forks programs for tests: what is left of it when its owner exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.system.prepared import ROOT

OWNER = """
import os, sys
from tests.system.prepared import prepared_python

python = prepared_python("json")
with open(os.devnull, "wb") as nothing:
    print(python.start([sys.argv[1]], dict(os.environ), nothing, nothing).wait(60.0))
"""


def test_nothing_is_left_to_the_garbage_collector_when_the_owner_exits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", OWNER, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (owner.stdout, owner.stderr) == ("3\n", "")
