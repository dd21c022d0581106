from __future__ import annotations

import contextlib
import io
import subprocess

import pytest

from baton.bench.command import BENCHMARKS
from baton.launch.cli import COMMANDS, main
from baton.launch.completion import SHELLS
from tests.launch.supervised import ROOT

ASK = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_baton
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {}
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["completion", shell]) == 0
        made[shell] = shown.getvalue()
    return made


def completed(script: str, *words: str) -> list[str]:
    command = ["bash", "--norc", "-c", script + ASK, "bash", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout.split()


def test_bash_completes_commands(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "ser") == ["serve"]
    assert set(completed(scripts["bash"], "baton", "")) == set(COMMANDS)


def test_bash_completes_what_follows_a_command(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "bench", "gp") == ["gpu-check"]
    assert completed(scripts["bash"], "baton", "cluster", "d") == ["down"]
    assert completed(scripts["bash"], "baton", "completion", "f") == ["fish"]


def test_bash_completes_the_flags_of_its_command_alone(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "serve", "model", "--max-model") == ["--max-model-len"]
    assert completed(scripts["bash"], "baton", "bench", "serve", "--request-r") == ["--request-rate"]
    assert completed(scripts["bash"], "baton", "serve", "--request-r") == []
    assert completed(scripts["bash"], "baton", "cluster", "up", "--l") == ["--local"]


def test_bash_completes_the_values_of_a_flag_and_else_files(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "serve", "--dtype", "") == ["auto", "bfloat16", "float16", "float32"]
    assert completed(scripts["bash"], "baton", "serve", "--config", "pypro") == ["pyproject.toml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_has_every_command_and_its_flags(scripts: dict[str, str], shell: str) -> None:
    assert all(name in scripts[shell] for name in (*COMMANDS, *BENCHMARKS, "max-model-len", "bfloat16", "roles"))
    assert "help-json" not in scripts[shell]
