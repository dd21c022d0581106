"""Whether tests see a mutant: a copy of the working tree in which one file at a time is changed, and the process that
runs tests in it.

Owns the copy, the choice of the tests for a mutant, and their order. A mutant is given to the tests that ran its line;
where it stands outside of every function, to those that ran anything in its file. Where no test of this process ran it
(a child process does), the tests of the folder that mirrors the file's get it. Only so many seconds of tests are run,
those of the file's own test file and the fastest others: a mutant that they leave alive counts as alive.

Invariants: the working tree is never changed; the copy is as the working tree while no trial runs, times of files
included; bytecode is written of unchanged files alone, and read while they are unchanged.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.mutation.operators import Mutant
from tests.mutation.traced import Traced

ROOT = Path(__file__).resolve().parents[2]
_COMPILED = "baton/engine/native/_kernels*.so"
_FIRST_TESTS = 12
"""So many are tried alone: most mutants live no longer, and these few come from few files."""
_TRACE_TIMEOUT_S = 3600.0
_TOLD_BYTES = 2000
_SLACK_S, _SLOWER = 15.0, 4.0
"""A test that takes so much longer than with the right code hangs."""
_ALL_SLOWER = 20.0
"""So do tests together; what is started for them takes its time too, and other programs use the machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: "killed", "timeout" (killed too) or "survived"; which test killed it, how many were to
    try, and in how many seconds."""

    outcome: str
    test: str
    num_tests: int
    seconds: float


@contextmanager
def working_copy() -> Iterator[Path]:
    """A copy of the working tree, what git ignores left out; compiled kernels come along."""
    with tempfile.TemporaryDirectory(prefix="baton-mutants-") as folder:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
        compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob(_COMPILED)]
        for name in filter(None, [*names, *compiled]):
            if os.path.lexists(ROOT / name):
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


class Worker:
    """The process that forks, see `tests.mutation.worker`. With the option -B neither it nor what tests start writes
    bytecode."""

    def __init__(self, copy: Path, *options: str) -> None:
        own = {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *options, "-m", "tests.mutation.worker"],
            cwd=copy,
            env={**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1" if "-B" in options else ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """The answer, which comes in time because the process ends what takes longer. Raises `RuntimeError` if it has
        ended itself."""
        asked: IO[str] = self._process.stdin  # type: ignore[assignment]  # both are pipes
        answers: IO[str] = self._process.stdout  # type: ignore[assignment]
        print(json.dumps(request), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError("the process that runs tests has ended")
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._process.communicate(timeout=_SLACK_S)


class Trials:
    """Runs tests in the copy, one mutant after the other."""

    def __init__(self, copy: Path, traced: Traced, max_test_s: float, slack_s: float = _SLACK_S) -> None:
        self._copy, self._traced, self._max_test_s, self._slack_s = copy, traced, max_test_s, slack_s
        self._write_bytecode()
        self._worker = Worker(copy, "-B")
        self._worker.ask({"imports": traced.modules})

    def close(self) -> None:
        """End the process that runs tests."""
        self._worker.close()

    def _write_bytecode(self) -> None:
        """All that tests import is compiled once, while nothing is changed."""
        with closing(Worker(self._copy)) as worker:
            self._ask(worker, range(len(self._traced.tests)), chosen=())

    def verdict(self, file: str, mutant: Mutant) -> Verdict:
        """Change the file in the copy, run tests, change it back."""
        source = (self._copy / file).read_bytes()
        tests = self._tests_for(file, source, mutant)
        begin_s = time.monotonic()
        with _changed(self._copy / file, mutant.applied_to(source)):
            outcome, test = self._run(tests)
        return Verdict(outcome, test, len(tests), round(time.monotonic() - begin_s, 2))

    def _run(self, tests: Sequence[int]) -> tuple[str, str]:
        for part in (tests[:_FIRST_TESTS], tests[_FIRST_TESTS:]):
            if not part:
                continue
            answer = self._ask(self._worker, part, part)
            if answer["outcome"] != "passed":
                return "timeout" if answer["outcome"] == "timeout" else "killed", answer.get("test") or answer[
                    "outcome"
                ]
        return "survived", ""

    def _ask(self, worker: Worker, collected: Sequence[int], chosen: Sequence[int]) -> dict[str, str]:
        """Collect the files of some tests, and run those that are chosen."""
        files = sorted({self._traced.tests[each].partition("::")[0] for each in collected})
        request = {
            "files": files,
            "tests": [self._traced.tests[each] for each in chosen],
            "test_timeout_s": self._slack_s + _SLOWER * max(self._traced.seconds[each] for each in collected),
            "timeout_s": 2 * self._slack_s + _ALL_SLOWER * sum(self._traced.seconds[each] for each in collected),
            "log": f"{self._copy}/.trial.log",
        }
        return worker.ask(request)

    def _tests_for(self, file: str, source: bytes, mutant: Mutant) -> list[int]:
        lines = self._traced.lines.get(file, {})
        first_lines = _statements_inside_functions(source)
        if mutant.line in first_lines:
            tests = {*lines.get(mutant.line, ()), *lines.get(first_lines[mutant.line], ())}
        else:
            tests = {test for each in lines.values() for test in each}
        return self._fastest(tests or self._tests_of_mirror(file), f"/test_{Path(file).stem}.py::")

    def _fastest(self, tests: Iterable[int], own_file: str) -> list[int]:
        """Those that fit into the time for a mutant, the fastest first; what is in its own test file fits before."""
        times = self._traced.seconds
        chosen, seconds = list[int](), 0.0
        for test in sorted(tests, key=lambda each: (own_file not in self._traced.tests[each], times[each])):
            seconds += times[test]
            if chosen and seconds > self._max_test_s:
                break
            chosen.append(test)
        return sorted(chosen, key=times.__getitem__)

    def _tests_of_mirror(self, file: str) -> list[int]:
        """Those of the deepest folder of tests that has the name of one of the file's."""
        for folder in Path("tests", file).parents:
            tests = [n for n, name in enumerate(self._traced.tests) if name.startswith(f"{folder}/")]
            if tests:
                return tests
        return []


def trace(copy: Path, tests: Sequence[str], files: Sequence[str]) -> Traced:
    """Run tests once; which lines of `files` each of them ran."""
    to, log = copy / ".trace.json", copy / ".trace.log"
    request = {"trace": list(files), "tests": list(tests), "to": str(to), "log": str(log)}
    with closing(Worker(copy)) as worker:
        if worker.ask({**request, "timeout_s": _TRACE_TIMEOUT_S})["outcome"] != "passed":
            raise RuntimeError(f"the tests could not be run: {log.read_text()[-_TOLD_BYTES:]}")
    return read_trace(to)


def read_trace(path: Path) -> Traced:
    """What `trace` has written."""
    traced = Traced(**json.loads(path.read_text()))
    for file, lines in traced.lines.items():
        traced.lines[file] = {int(line): tests for line, tests in lines.items()}
    return traced


@contextmanager
def _changed(path: Path, source: bytes) -> Iterator[None]:
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(source)
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _statements_inside_functions(source: bytes) -> dict[int, int]:
    """For each line that runs when a function is called, the first line of the innermost statement it is in."""
    first: dict[int, int] = {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in (each for part in function.body for each in ast.walk(part) if isinstance(each, ast.stmt)):
                for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
                    first[line] = max(first.get(line, 0), statement.lineno)
    return first
