"""`python -m baton.bench.gpu_check`: check and measure the whole GPU path, in less than 8 minutes on one GPU, and 9 on
two.

Prints tables; exits with 1 when a result is wrong or a check could not be finished, with 0 when speeds alone are below
their targets (`--strict`: with 1 for those too). Of the card nothing is ever set, only read.

Owns the list of groups, their processes and the time: one process for the tests of a group (a file of `tests/gpu`) and
one for each thing it measures (a name that `baton.bench.gpu_check.measure_process` knows). They say rows, see
`baton.bench.gpu_check.rows.say`. Invariants: everything planned gives at least one row; a process that crashed, hung or
raised costs what it was at; a group never outlives its limit by more than the time to kill it; all groups end within
`TOTAL_S`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.arguments import names_in, parse_alone, require_folder, say, write_json
from baton.bench.facts import ROOT, as_lines, collect_facts
from baton.bench.gpu_check.rows import CORRECTNESS, Row, exit_status, failed_row, missing_row, render
from baton.runtime.child import PIPE, Child
from baton.runtime.settings import setting
from baton.wire.errors import ChildFailed, InvalidSetting

MEASURE = "baton.bench.gpu_check.measure_process"
TESTS = ROOT / "tests" / "gpu"
TOTAL_S = 530.0
"""Below 9 minutes, with time to start and to print; with one GPU ranks take no time."""
TRANSPORTS = ("shm", "zmq", "nixl", "nccl")
MODELS = ("8B", "0.6B")
_PATIENCE_WITH_CPU = 3
"""Times the limit, where nothing is as fast as on a GPU."""
_PYTEST_FLAGS = ("-p", "tests.gpu.rows_plugin", "-p", "no:cacheprovider", "-q", "-s", "--tb=short")
_DESCRIPTION = "Check and measure the GPU path of Baton on this machine."
_PACKAGES = ("baton-serve", "torch", "triton", "transformers", "flashinfer-python", "nixl", "numpy", "pyzmq")
_START_S, _SMI_S = 60.0, 10.0
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
_SMI_FIELDS = ("name", "driver_version", *_CLOCKS, "power.limit", "temperature.gpu")


@dataclass(frozen=True, slots=True)
class GpuCheckSettings:
    only: str = setting("", "run only these groups, for example attention,graphs; empty: all")
    device: str = setting(
        "cuda", "what to check; cpu: the same code with tiny sizes, speeds mean nothing", choices=("cuda", "cpu")
    )
    quick: bool = setting(False, "fewer cases and rounds")
    strict: bool = setting(False, "exit with 1 for a missed target too")
    json: str = setting("", "file for the table, the machine and the versions")


@dataclass(frozen=True, slots=True)
class Group:
    """`tests`: a file of `tests/gpu`, "" for none. `limit_s`: when the group is ended, whatever it does."""

    name: str
    doc: str
    limit_s: float
    tests: str = ""
    measures: tuple[str, ...] = ()


def all_groups(*, quick: bool) -> tuple[Group, ...]:
    """Correctness first, then speed, each in the order in which a reader wants to know."""
    models, transports = (MODELS[:1], TRANSPORTS[:1]) if quick else (MODELS, TRANSPORTS)
    return (
        Group("attention", "attention against float64", 65, "test_attention.py"),
        Group("operations", "fused operations against plain torch", 25, "test_operations.py"),
        Group("device", "checksums and sampler on the device", 30, "test_device.py", ("checksums",)),
        Group("graphs", "recorded decode steps against eager ones", 40, "test_graphs.py", ("step time",)),
        Group("served", "prefill and decode node, tokens against transformers", 75, "test_relay.py"),
        Group("transfer", "KV handoffs between two processes", 55, "test_transfer.py", transports),
        Group("decode", "decode steps against memory bandwidth", 45, measures=models),
        Group("prefill", "a prompt of 8,192 tokens against matrix products", 25, measures=models),
        Group("exposed", "what is left of the transfer at 8,192 tokens", 40, measures=("exposed transfer",)),
        Group("ranks", "ranks with a GPU each, tokens against one GPU", 60, "test_ranks.py"),
    )


def chosen_groups(only: str, *, quick: bool) -> tuple[Group, ...]:
    """Those that `only` names ("a,b"); "" names all. Raises `InvalidSetting`."""
    groups = all_groups(quick=quick)
    names = names_in(only, "--only", [group.name for group in groups])
    return tuple(group for group in groups if not names or group.name in names)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The rows of one group, and what it took."""

    group: Group
    rows: tuple[Row, ...]
    taken_s: float
    limit_s: float

    @property
    def title(self) -> str:
        return f"{self.group.name}: {self.group.doc} ({self.taken_s:.0f} s of {self.limit_s:g} s)"

    def as_json(self) -> dict[str, Any]:
        taken = {"taken_s": round(self.taken_s, 3), "limit_s": self.limit_s}
        return {"name": self.group.name, "doc": self.group.doc, **taken, "rows": [row.as_json() for row in self.rows]}


class GroupRun:
    """One group while it runs. `tests` and `measure` are where things are; others in tests."""

    def __init__(self, group: Group, device: str, *, quick: bool, tests: Path = TESTS, measure: str = MEASURE) -> None:
        self._group, self._device, self._quick = group, device, quick
        self._tests, self._measure = tests, measure
        self._limit_s = group.limit_s * (_PATIENCE_WITH_CPU if device == "cpu" else 1)
        self._deadline_s = 0.0

    def run(self, say: Callable[[str], None]) -> GroupResult:
        """Do all of the group; `say` hears what is next."""
        begin_s = time.monotonic()
        self._deadline_s = begin_s + self._limit_s
        rows: list[Row] = []
        if self._group.tests:
            say(f"{self._group.name}: {self._group.tests}")
            rows += self._run_tests()
        for name in self._group.measures:
            say(f"{self._group.name}: {name}")
            arguments = (self._group.name, self._device, "quick" if self._quick else "", name)
            rows += self._rows_of(name, self._measure, *arguments)
        if self._device == "cpu":
            rows = [row.where_no_gpu_is() for row in rows]
        return GroupResult(self._group, tuple(rows), time.monotonic() - begin_s, self._limit_s)

    def _run_tests(self) -> list[Row]:
        file = self._tests / self._group.tests
        missing = ""
        if not file.is_file():
            missing = "tests/gpu is part of a checkout, and this is none"
        elif any(importlib.util.find_spec(name) is None for name in ("pytest", "pytest_asyncio", "pytest_timeout")):
            missing = "pip install pytest pytest-asyncio pytest-timeout"
        if missing:
            return [missing_row(CORRECTNESS, self._group.name, missing)]
        return self._rows_of(self._group.tests, "pytest", *_PYTEST_FLAGS, str(file))

    def _rows_of(self, name: str, module: str, *arguments: str) -> list[Row]:
        if self._left_s <= 0:
            return [failed_row(self._group.name, name, f"not reached within the {self._limit_s:g} s of this group")]
        told = {"BATON_GPU_TESTS": self._device, "BATON_GPU_TESTS_QUICK": "1" if self._quick else ""}
        environment = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **os.environ, **told}
        rows: list[Row] = []
        at = name
        try:
            with Child(module, *arguments, environment=environment, stdout=PIPE) as child:
                while "done" not in (message := next_message(child, max(0.0, self._left_s))):
                    at = str(message.get("begun", at))
                    if "row" in message:
                        rows.append(Row.from_json(message["row"]))
        except ChildFailed as error:
            rows.append(failed_row(self._group.name, at, str(error)))
        except (TypeError, ValueError, KeyError) as error:
            rows.append(failed_row(self._group.name, at, f"a row that cannot be read: {error}"))
        return rows or [failed_row(self._group.name, name, "no row came of it")]

    @property
    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()


def next_message(child: Child, timeout_s: float) -> dict[str, Any]:
    """What a process says next; all else that it writes goes on to stderr. Raises `ChildFailed`, `ValueError`."""
    deadline_s = time.monotonic() + timeout_s
    while not (line := child.read_line(max(0.0, deadline_s - time.monotonic()))).startswith(b'{"'):
        sys.stderr.write(line.decode(errors="replace") + "\n" * bool(line))
    message: dict[str, Any] = json.loads(line)
    return message


def main(arguments: Sequence[str]) -> int:
    """Check, measure and print; the exit status. Raises `BatonError` when nothing could be begun."""
    settings = parse_alone("python -m baton.bench.gpu_check", _DESCRIPTION, arguments, GpuCheckSettings)
    require_folder(settings.json)
    groups = chosen_groups(settings.only, quick=settings.quick)
    device = _describe_device(settings.device)
    facts = collect_facts(shlex.join(["python", "-m", "baton.bench.gpu_check", *arguments]), _PACKAGES)
    say(f"{device['device']}: {len(groups)} groups, at most {sum(group.limit_s for group in groups):g} s")
    before = _read_clocks()
    results = [GroupRun(group, settings.device, quick=settings.quick).run(say) for group in groups]
    status = exit_status([row for result in results for row in result.rows], strict=settings.strict)
    print(as_lines([*facts.conditions, *device.items()]), "\n")
    print(render([(result.title, result.rows) for result in results]))
    if settings.json:
        content = {
            "facts": dataclasses.asdict(facts),
            "device": device,
            "clocks": {"before": before, "after": _read_clocks()},
            "status": status,
            "groups": [result.as_json() for result in results],
        }
        write_json(settings.json, content)
    return status


def _describe_device(device: str) -> dict[str, Any]:
    """What torch sees. Raises `InvalidSetting` when there is no such device."""
    with Child(MEASURE, "machine", device, "", "", stdout=PIPE) as child:
        try:
            found = next_message(child, _START_S)
        except ChildFailed as error:
            raise InvalidSetting(f"--device {device}: torch does not start: {error}") from None
    if "missing" in found:
        raise InvalidSetting(found["missing"])
    return found


def _read_clocks() -> list[dict[str, str]]:
    """What `nvidia-smi` says of each GPU now; [] where there is no such program."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[value.strip() for value in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [dict(zip(_SMI_FIELDS, values, strict=False)) for values in lines]
