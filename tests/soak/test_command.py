"""A part has the configuration of those before it, and what does not fit is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.settings import parse
from tests.soak.__main__ import configuration_of, main, settings_of
from tests.soak.kept import Kept


def test_a_configuration_gives_the_settings_again() -> None:
    first = parse(["--clients", "3", "--kinds", "cut,freeze", "--layout", "1P2D", "--seed", "5"])
    again = settings_of(configuration_of(first), parse(["--seed", "5"]))
    assert again.command.replace("--faults 60 --minutes 1", "") == first.command.replace("--faults 60 --minutes 1", "")


def test_a_folder_of_another_configuration_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Kept(tmp_path, configuration_of(parse(["--clients", "3"])), 1).write()
    before = (tmp_path / "parts.json").read_bytes()
    assert main(["--minutes", "0", "--resume", str(tmp_path), "--clients", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another configuration: " in line
    assert "num_clients is 3 there and 4 here" in line
    assert (tmp_path / "parts.json").read_bytes() == before
