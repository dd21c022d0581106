from __future__ import annotations

import gc
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.runtime.process import FIELDS, configure_logging, make_formatter, quick_imports

_START = """
import psutil
from baton.runtime.process import keep_freed_memory, return_freed_memory
def held():
    return psutil.Process().memory_info().rss >> 20
keep_freed_memory()
before = held()
def need_more_than_the_program_will():
    return [bytearray(b"x") * 2**20 for _ in range(64)]
need_more_than_the_program_will()
kept = held() - before
return_freed_memory()
print(kept, held() - before)
"""

_THREADS = """
import psutil, sys, threading
from baton.runtime.process import give_back_freed_memory, return_freed_memory
if sys.argv[1] == "bounded":
    give_back_freed_memory()
before = psutil.Process().memory_info().rss >> 20
together = threading.Barrier(6)
def need_much_for_a_moment():
    bytearray(b"x") * (30 << 20)  # glibc keeps more from here on, unless it was told
    together.wait(30)
    pieces = [bytearray(b"x") * (1 << 18) for _ in range(80)]
    together.wait(30)
    del pieces
    together.wait(30)
threads = [threading.Thread(target=need_much_for_a_moment) for _ in range(6)]
for each in threads: each.start()
for each in threads: each.join()
return_freed_memory()
print((psutil.Process().memory_info().rss >> 20) - before)
"""


def _mib_left_by_threads(how: str) -> int:
    command = [sys.executable, "-c", _THREADS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_what_many_threads_have_freed_goes_back_where_it_is_to() -> None:
    assert _mib_left_by_threads("as it comes") > 64
    assert _mib_left_by_threads("bounded") < 24


def test_what_a_start_has_freed_is_kept_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True, timeout=60)
    kept_mib, left_mib = map(int, done.stdout.split())
    assert kept_mib > 48
    assert left_mib < 16


def test_garbage_is_looked_for_again_after_imports_but_not_in_them() -> None:
    try:
        with suppress(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError("no such module")
        assert gc.isenabled()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def _record(message: str, *arguments: object, **members: object) -> logging.LogRecord:
    record = logging.LogRecord("baton.router.requests.flight", logging.WARNING, "f.py", 1, message, arguments, None)
    vars(record).update(members)
    return record


def test_a_json_line_is_one_object_whatever_is_logged() -> None:
    record = _record("line %d\nline 2", 1, **{FIELDS: {"request_id": "job-7", "ttft_s": None}})
    line = make_formatter("json").format(record)
    assert "\n" not in line
    members = json.loads(line)
    assert abs(members.pop("time_s") - record.created) < 1e-3
    assert members == {
        "level": "warning",
        "logger": "baton.router.requests.flight",
        "message": "line 1\nline 2",
        "request_id": "job-7",
        "ttft_s": None,
    }


def test_a_json_line_has_the_traceback() -> None:
    record = _record("it failed")
    try:
        raise ValueError("the reason")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: the reason" in json.loads(make_formatter("json").format(record))["exception"]


def test_a_text_line_ends_with_the_fields_that_have_a_value() -> None:
    record = _record("request ended", **{FIELDS: {"request_id": "job-7", "ttft_s": None, "path": ""}})
    assert (
        make_formatter("text")
        .format(record)
        .endswith("WARNING baton.router.requests.flight: request ended request_id=job-7")
    )


class Disk(io.StringIO):
    """What lies on it, until it is full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    root = logging.getLogger()
    handlers, level, disk = root.handlers[:], root.level, Disk()
    monkeypatch.setattr(sys, "stderr", disk)
    configure_logging("info")
    yield disk
    root.handlers[:], root.level = handlers, level


def test_lines_that_a_full_disk_has_refused_are_counted(stderr: Disk) -> None:
    log = logging.getLogger("router")
    stderr.is_full = True
    log.info("one")
    log.info("two")
    stderr.is_full = False
    log.info("three")
    log.info("four")
    lines = [line.partition(": ")[2] for line in stderr.getvalue().splitlines()]
    assert lines == ["three", "2 lines of this log could not be written", "four"]
