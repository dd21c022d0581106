"""Prompts and steps of several engines in turns."""

import os
import sys

import pytest

from baton.bench.limits.step_turns import main, measure, table
from baton.wire.errors import InvalidSetting, RequestFailed


def test_each_engine_is_compared_with_the_first_case_by_case() -> None:
    found = {"ours": {"512": [1.0, 2.0, 1.5], "1x512": [0.5]}, "theirs": {"512": [2.0, 2.0, 3.0]}}

    *_, prompt, step = table(found).splitlines()

    assert prompt == "| 512 | 1,500 | 2,000 (1.33; 1.00 to 2.00) |"
    assert step == "| 1x512 | 500 | - |"


def test_a_command_may_print_other_lines_beside_its_times() -> None:
    lines = 'print(\'loading\'); print(\'{"case": "8x512", "seconds": 0.25}\')'

    assert measure([sys.executable, "-S", "-c", lines], os.sched_getaffinity(0)) == {"8x512": 0.25}


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(RequestFailed, match="no-such-program"):
        measure(["no-such-program"], os.sched_getaffinity(0))


def test_a_target_needs_a_command() -> None:
    with pytest.raises(InvalidSetting, match="NAME=COMMAND"):
        main(["ours"])
