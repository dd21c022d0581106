from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.launch import key
from baton.launch.cli import COMMANDS, main
from baton.wire.errors import InvalidSetting
from tests.launch.supervised import ROOT

MAX_HELP_LINES = 60
PRINT_HEAVY_MODULES = """
import sys
from baton.launch.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("status", end.code)
print("loaded", sorted({"torch", "transformers", "aiohttp", "zmq"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["key", "--help"], ["version"]])
def test_light_commands_load_no_heavy_library(arguments: list[str]) -> None:
    command = [sys.executable, "-c", PRINT_HEAVY_MODULES, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert finished.stdout.endswith("loaded []\n")


def test_serve_resolves_its_settings_without_torch() -> None:
    command = [sys.executable, "-c", PRINT_HEAVY_MODULES, "serve", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "'torch'" not in finished.stdout
    assert "--prefill" in finished.stdout


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["--strange"], ["strange"], ["chat", "--strange"], ["chat", "--ur=x"]])
def test_unknown_commands_and_flags_are_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    shown = capsys.readouterr().err
    assert shown.startswith("error: unknown ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(("arguments", "suggestion"), [
    (["srve"], "unknown command 'srve': did you mean serve? (baton --help)"),
    (["serve", "--max-modle-len", "9"], "unknown flag '--max-modle-len': did you mean --max-model-len?"),
    (["serve", "--served-modelname=x"], "unknown flag '--served-modelname': did you mean --served-model-name?"),
    (["serve", "--tensor-parallel", "2"], "unknown flag '--tensor-parallel': did you mean --tensor-parallel-size?"),
    (["serve", "--gpu=2"], "unknown flag '--gpu': did you mean --gpu-memory-utilization? (baton serve --help)"),
    (["serve", "--tp=2"], "unknown flag '--tp': did you mean -tp?"),
    (["serve", "--disable-prefix-caching"], "unknown flag '--disable-prefix-caching': did you mean --no-enable-prefi"),
    (["router", "--prot", "1"], "unknown flag '--prot': did you mean --port? (baton router --help)"),
    (["decode", "--nodeid=x"], "unknown flag '--nodeid': did you mean --node-id? (baton decode --help)"),
    (["bench", "serv"], "unknown benchmark 'serv': did you mean serve? (baton bench --help)"),
    (["key", "file", "another"], "unknown argument 'another' (baton key --help)"),
])  # fmt: skip
def test_a_misspelt_word_is_answered_with_the_likely_one(
    arguments: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith(f"error: {suggestion}")


@pytest.mark.parametrize("command", ["serve", "router", "prefill", "decode", "node", "rank", "plan", "chat"])
def test_help_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert capsys.readouterr().out.count("\n") <= MAX_HELP_LINES


def test_the_help_of_serve_begins_with_the_flags_that_matter_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    usual, _, groups = capsys.readouterr().out.partition("more flags, by group")
    assert re.findall(r"^  (--[a-z-]+)", usual, re.MULTILINE)[2:] == [
        "--prefill", "--decode", "--host", "--port", "--served-model-name", "--api-key-file", "--device",
        "--max-model-len", "--max-num-seqs", "--tensor-parallel-size",
    ]  # fmt: skip
    assert "\n  cache     --kv-cache-dtype " in groups


def test_a_package_that_is_not_installed_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.delitem(sys.modules, "baton.launch.completion", raising=False)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "error: shtab is not installed, see `baton doctor`: pip install baton-serve\n"


def test_baton_alone_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_a_setting_that_cannot_be_used_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: --url 'nowhere' is not of the form http://HOST:PORT\n"


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(key, "main", interrupted)
    assert main(["key", "file"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("options", [[], ["-u"]])  # it is written when the command has ended, or at once
def test_output_that_nobody_reads_any_more_ends_a_command_without_a_word(options: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        finished = subprocess.run(
            [sys.executable, *options, "-m", "baton", "version"],
            stdout=gone,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (finished.returncode, finished.stderr) == (1, b"")


def test_a_full_disk_under_the_output_is_one_error() -> None:
    with open("/dev/full", "w") as full:
        finished = subprocess.run(
            [sys.executable, "-m", "baton", "version"], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    assert finished.returncode == 1
    assert finished.stderr == b"error: the output cannot be written: No space left on device\n"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("baton ")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == shown


def test_a_new_key_works_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    from baton.wire.keys import KeyFile

    path = tmp_path / "cluster.key"
    assert main(["key", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert [len(secret) for secret in KeyFile.read(path).secrets] == [40]


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.write_text("precious")
    with pytest.raises(InvalidSetting, match="never overwritten"):
        key.write_key(path)
    assert path.read_text() == "precious"


def test_a_key_in_a_missing_folder_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", str(tmp_path / "missing" / "cluster.key")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
