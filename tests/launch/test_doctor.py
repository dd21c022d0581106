from __future__ import annotations

import json
import subprocess
import sys

import pytest

from baton.launch.doctor import report
from baton.launch.doctor_checks import CHECKS, MISSING, NOTE, OK, Check, Found
from tests.launch.supervised import ROOT


def broken() -> Found:
    raise ImportError("libcudart.so.12: cannot open\nshared object file")


FINE = Check("memory", lambda: Found(OK, "plenty"))
EXTRA = Check("nixl", lambda: Found(NOTE, "not installed", "pip install nixl"))


def test_each_line_says_what_there_is_and_the_command_that_gets_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([FINE, EXTRA], as_json=False) == 0
    assert [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()] == [
        ["ok", "memory", "plenty"],
        ["note", "nixl", "not installed: pip install nixl"],
    ]


def test_a_broken_import_is_a_line_and_the_next_check_follows(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("torch", broken, is_needed=True, fix="pip install torch"), Check("flashinfer", broken), FINE]
    assert report(checks, as_json=False) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].endswith("file: pip install torch")
    assert [line.split()[0] for line in shown.out.splitlines()] == [MISSING, NOTE, OK]
    assert shown.err == "error: something that serving needs is missing\n"


def test_the_json_object_has_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([EXTRA, Check("torch", broken, is_needed=True)], as_json=True) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["is_ready"] is False
    assert document["lines"][0] == {"state": NOTE, "name": "nixl", "text": "not installed", "fix": "pip install nixl"}


def test_a_real_run_looks_at_everything_and_prints_before_it_imports_torch() -> None:
    watched = "import sys; from baton.launch import doctor; print('torch' in sys.modules); sys.exit(doctor.main([]))"
    finished = subprocess.run([sys.executable, "-c", watched], capture_output=True, text=True, cwd=ROOT, check=True)
    first, *lines = finished.stdout.splitlines()
    assert first == "False"
    assert all(line[9:].startswith(check.name) for check, line in zip(CHECKS, lines, strict=True))
