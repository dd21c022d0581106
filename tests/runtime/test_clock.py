from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.runtime.clock import host_clock, now_us


def a_proc(folder: Path, boot: str, *, has_namespaces: bool = True) -> Path:
    """A folder with the files that the name of a clock is made of."""
    (folder / "sys/kernel/random").mkdir(parents=True)
    (folder / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (folder / "self/ns").mkdir(parents=True)
    if has_namespaces:
        (folder / "self/ns/time").touch()
    return folder


def test_it_is_the_monotonic_clock_in_microseconds() -> None:
    before_s, between_us, after_s = time.monotonic(), now_us(), time.monotonic()
    assert before_s * 1e6 - 1 <= between_us <= after_s * 1e6


def test_another_process_of_this_host_has_the_same_clock() -> None:
    asked = "from baton.runtime.clock import host_clock, now_us; print(host_clock(), now_us())"
    before_us = now_us()
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True).stdout.split()
    assert answer[0] == host_clock() != ""
    assert before_us < int(answer[1]) < now_us()


def test_a_name_is_8_hex_digits() -> None:
    assert len(host_clock()) == len(bytes.fromhex(host_clock())) * 2 == 8


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_another_boot_is_another_clock(tmp_path: Path, has_namespaces: bool) -> None:
    first, second = (a_proc(tmp_path / boot, boot, has_namespaces=has_namespaces) for boot in ("a", "b"))
    assert host_clock(first) == host_clock(first) != host_clock(second)


def test_another_time_namespace_is_another_clock(tmp_path: Path) -> None:
    first, second = (a_proc(tmp_path / name, "one boot") for name in ("a", "b"))
    assert host_clock(first) != host_clock(second)


def test_a_system_that_does_not_tell_has_no_name_for_its_clock(tmp_path: Path) -> None:
    assert host_clock(tmp_path) == ""
