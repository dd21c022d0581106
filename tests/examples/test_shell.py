"""The examples that start programs: their syntax, and that each `baton` line is one that the program takes.

They take half a minute each and need root or Ray, so they are commands: each ends with an error unless it was answered.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from baton.launch.cli import COMMANDS
from baton.node.settings import NodeSettings
from baton.router.settings import RouterSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.settings import add_flags, resolve
from tests.examples.conftest import EXAMPLES

SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
SETTINGS = {"router": RouterSettings, "prefill": NodeSettings, "decode": NodeSettings}
_BATON = re.compile(r"^(?:on_\w+ )?baton ([^>&#]*?)(?: 2?>.*)?(?: &)?(?:#.*)?$", re.M)


def _lines(script: Path) -> list[list[str]]:
    """What follows `baton` in each line, as the shell divides it, with something in the place of variables."""
    joined = re.sub(r"\\\n\s*", "", script.read_text())
    return [shlex.split(re.sub(r"\$\w+", "x", found)) for found in _BATON.findall(joined)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_understands_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.stat().st_mode & 0o100, "it can be run"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_program_takes_its_flags(script: Path) -> None:
    lines = _lines(script)
    assert lines
    for command, *arguments in lines:
        assert command in COMMANDS
        if command in SETTINGS:
            parser = CommandParser(prog=f"baton {command}")
            add_flags(parser, SETTINGS[command])
            flags: argparse.Namespace = parser.parse(arguments)
            resolve(SETTINGS[command], flags, {})
