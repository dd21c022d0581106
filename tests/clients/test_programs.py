"""How `python -m tests.clients` judges a load generator, with a shell as the program."""

from __future__ import annotations

import shutil

import pytest

from tests.clients.programs import NotInstalled, Program, check, run_program

RESULT = {"failed": 0, "runs": [{"tokens": {"sum": 320.0}}], "errors": []}
SHELL = shutil.which("sh") or "sh"


def _program(script: str) -> Program:
    expected = {"failed": 0, "model": "a name"}
    return Program("a shell", "sh", "script {model}", "**/result*.json", expected, files={"script": script})


def test_a_result_with_all_that_was_expected_passes() -> None:
    check(RESULT, {"failed": 0, "runs.0.tokens.sum": 320, "errors": []})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("failed", 1, "failed is 0, not 1"),
        ("runs.0.tokens.sum", 319, "runs.0.tokens.sum is 320.0, not 319"),
        ("runs.1.tokens.sum", 320, "runs.1.tokens.sum is absent, not 320"),
        ("failed.sum", 0, "failed.sum is absent, not 0"),
    ],
)
def test_another_value_and_a_missing_one_are_named(path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(RESULT, {path: value, "errors": []})


def test_a_program_is_judged_by_the_file_it_writes() -> None:
    text = 'mkdir out; echo "{\\"failed\\": $FAILED, \\"model\\": \\"$1\\"}" > out/result-1.json'
    run_program(_program(f"FAILED=0; {text}"), SHELL, {"model": "a name"})
    with pytest.raises(ValueError, match="failed is absent"):
        run_program(_program("exit 0"), SHELL, {"model": "a name"})
    with pytest.raises(ValueError, match="failed is 2, not 0"):
        run_program(_program(f"FAILED=2; {text}"), SHELL, {"model": "a name"})


def test_the_end_of_what_a_failing_program_said_is_reported() -> None:
    with pytest.raises(ValueError, match="exit status 3, and at the end: no server"):
        run_program(_program("echo no server >&2; exit 3"), SHELL, {"model": "m"})


def test_a_program_that_is_not_there_is_told_from_one_that_fails() -> None:
    with pytest.raises(NotInstalled):
        run_program(_program(""), "/nothing", {"model": "m"})
