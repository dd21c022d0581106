"""Parts are kept whole whenever their program ends, and only with their like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.kept import FILE_NAME, Kept, LongGap, Part, SoakRefused, locked

CONFIGURATION: dict[str, object] = {"num_clients": 4, "kinds": ["cut"]}
_WRITES_FOR_EVER = """
import sys
from pathlib import Path
from tests.soak.kept import Kept
kept = Kept(Path(sys.argv[1]), {}, 7)
kept.begin("code", "now")
while True:
    kept.parts[0].findings.append("x" * 1000)
    kept.write()
    print(len(kept.parts[0].findings), flush=True)
"""


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, CONFIGURATION, 7)
    part = kept.begin("code", "2026-11-27 02:00")
    part.running_s, part.gaps, part.samples = 30.5, [LongGap(0.7, 0.5, [])], {"router": [[0.0, 40.0, 9.0, 1e8]]}
    kept.write()
    again = Kept.read(tmp_path)
    assert again is not None
    assert (again.parts, again.configuration, again.first_seed) == ([part], CONFIGURATION, 7)


def test_the_next_part_has_the_next_number_and_seed_and_one_that_was_killed_has_counted(tmp_path: Path) -> None:
    Kept(tmp_path, CONFIGURATION, 7, [Part(1, 7, "code", "", running_s=90.0)]).write()
    kept = Kept.read(tmp_path)
    assert kept is not None
    part = kept.begin("code", "")
    assert (part.number, part.seed) == (2, 8)
    assert [each.running_s for each in kept.parts] == [90.0, 0.0]


def test_whoever_is_killed_while_it_writes_leaves_what_it_wrote_last(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        os.kill(writer.pid, signal.SIGKILL)
    kept = Kept.read(tmp_path)
    assert kept is not None
    assert len(kept.parts[0].findings) >= 20


def test_another_configuration_is_refused_in_one_line_by_what_differs(tmp_path: Path) -> None:
    kept = Kept(tmp_path, CONFIGURATION, 7)
    kept.require(dict(CONFIGURATION))
    with pytest.raises(SoakRefused, match=r"another configuration: num_clients is 4 there and 5 here$") as refused:
        kept.require(CONFIGURATION | {"num_clients": 5})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"parts": [{"number": 1}]})])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(SoakRefused, match="cannot be read as the parts of a soak"):
        Kept.read(tmp_path)


def test_an_empty_folder_has_no_parts(tmp_path: Path) -> None:
    assert Kept.read(tmp_path) is None


def test_two_parts_do_not_run_in_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "soak"), pytest.raises(SoakRefused, match="another part runs"), locked(tmp_path / "soak"):
        pass
    with locked(tmp_path / "soak"):
        pass
