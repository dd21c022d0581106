"""Tests see a mutant of a small program: in a process of its own, as a real one of Baton."""

from __future__ import annotations

import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.mutation import trial
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.traced import Traced, Tracing
from tests.mutation.trial import ROOT, Trials, trace, working_copy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process that forks needs Linux")

PROGRAM = """\
def double(x):
    if x > 100:
        return 0
    return x + x


def wait(x):
    while x < 1:
        x += 1
    return x
"""
TESTS = """\
from program import double, wait


def test_double():
    assert double(2) == 4
    assert double(1000) == 0


def test_wait():
    assert wait(0) == 1
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "test_program.py").write_text(TESTS)
    (folder / "tests").mkdir()
    for name in ("mutation", "campaign"):  # of these the process that forks is made
        (folder / "tests" / name).symlink_to(ROOT / "tests" / name)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return folder


@pytest.fixture(scope="module")
def traced(copy: Path) -> Traced:
    return trace(copy, ["test_program.py"], ["program.py"])


def mutant(after: str) -> Mutant:
    source = PROGRAM.encode()
    return next(each for each in mutants_of(source) if each.lines_of(source)[1] == after)


def test_tests_are_known_by_the_lines_they_run(traced: Traced) -> None:
    names = {line: [traced.tests[test] for test in tests] for line, tests in traced.lines["program.py"].items()}
    assert names[4] == ["test_program.py::test_double"]
    assert names[10] == ["test_program.py::test_wait"]


def test_a_mutant_is_killed_by_a_test_or_stays(copy: Path, traced: Traced) -> None:
    with closing(Trials(copy, traced, max_test_s=10.0)) as trials:
        wrong = trials.verdict("program.py", mutant("return (x - x)"))
        assert (copy / "program.py").read_text() == PROGRAM
        unseen = trials.verdict("program.py", mutant("if x > 101:"))
    assert (wrong.outcome, wrong.test) == ("killed", "test_program.py::test_double")
    assert (unseen.outcome, unseen.num_tests) == ("survived", 1)


def test_a_mutant_that_never_ends_is_ended(copy: Path, traced: Traced) -> None:
    with closing(Trials(copy, traced, max_test_s=10.0, slack_s=0.2)) as trials:
        assert trials.verdict("program.py", mutant("x -= 1")).outcome == "timeout"


def test_a_folder_that_is_imported_by_a_link_is_copied_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("room", "baton"):
        (tmp_path / name).mkdir()
    (tmp_path / "room" / "program.py").write_text("x = 1\n")
    (tmp_path / "baton" / "room").symlink_to("../room")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    with working_copy() as copy:
        imported = copy / "baton" / "room" / "program.py"
        assert imported.resolve() == (copy / "room" / "program.py").resolve()
        tracing = Tracing(copy, ["room/program.py"])
        protocol = tracing.pytest_runtest_protocol(cast("pytest.Item", SimpleNamespace(nodeid="test")))
        next(protocol)
        runpy.run_path(str(imported))
        assert next(protocol, "over") == "over"
    assert tracing.traced.lines == {"room/program.py": {1: [0]}}
