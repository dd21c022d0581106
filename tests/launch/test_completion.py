from __future__ import annotations

import contextlib
import io
import subprocess

import pytest

from baton.launch.cli import COMMANDS, main

ASK = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_baton
echo "${COMPREPLY[*]}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {}
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["completion", shell]) == 0
        made[shell] = shown.getvalue()
    return made


def completed(script: str, *words: str) -> list[str]:
    command = ["bash", "--norc", "-c", script + ASK, "bash", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_bash_completes_commands(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "ser") == ["serve"]
    assert set(completed(scripts["bash"], "baton", "")) > set(COMMANDS)


def test_bash_completes_what_follows_a_command(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "bench", "gp") == ["gpu-check"]
    assert completed(scripts["bash"], "baton", "cluster", "d") == ["down"]
    assert completed(scripts["bash"], "baton", "completion", "f") == ["fish"]


def test_bash_completes_the_flags_of_its_command_alone(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "serve", "model", "--max-model") == ["--max-model-len"]
    assert completed(scripts["bash"], "baton", "bench", "serve", "--request-r") == ["--request-rate"]
    assert completed(scripts["bash"], "baton", "serve", "--request-r") == []
    assert completed(scripts["bash"], "baton", "cluster", "up", "--l") == ["--local"]


def test_bash_completes_the_values_of_a_flag(scripts: dict[str, str]) -> None:
    assert completed(scripts["bash"], "baton", "serve", "--dtype", "") == ["auto", "bfloat16", "float16", "float32"]
    assert completed(scripts["bash"], "baton", "serve", "--dtype", "=", "bf") == ["bfloat16"]
    assert completed(scripts["bash"], "baton", "serve", "--config", "") == []  # bash then completes files


def test_every_script_has_every_command_and_its_flags(scripts: dict[str, str]) -> None:
    assert all(f"'{name} '*)" in scripts["zsh"] and f'" {name} *"' in scripts["fish"] for name in COMMANDS)
    assert (
        "'--max-model-len[longest prompt plus output in tokens; 0 the models own limit]:value:_files'" in scripts["zsh"]
    )
    assert "'__baton_at \" serve *\"' -l dtype -x -a 'auto bfloat16 float16 float32'" in scripts["fish"]


def test_the_flag_that_lists_flags_is_in_no_script(scripts: dict[str, str]) -> None:
    assert all("help-json" not in script for script in scripts.values())
