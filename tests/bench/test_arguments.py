from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.arguments import require_folder, write_text
from baton.wire.errors import InvalidSetting


def test_a_file_that_can_be_written_is(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    require_folder("")
    require_folder(str(path))
    write_text(str(path), "{}\n")
    assert path.read_text() == "{}\n"


def test_the_flag_and_the_reason_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "plot.png"
    with pytest.raises(InvalidSetting, match=f"^--plot {missing}: there is no such folder$"):
        require_folder(missing, "--plot")
    with pytest.raises(InvalidSetting, match=f"^--json {tmp_path}: Is a directory$"):
        write_text(str(tmp_path), "{}")
