"""Lines of measurements become tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measured import against, report, rows_of, tables


def test_lines_of_a_kind_are_one_table_in_which_later_cells_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    report("turn", {"a": {"1": "old", "2": "kept"}}, [], file)
    report("turn", {"b": {"2": "x", "3": "y"}}, [], file)
    report("turn", {"a": {"1": "new"}}, [], file)
    report("restart", {"c": {"1": "z"}}, [], file)
    found = tables(file.read_text().splitlines())
    assert rows_of("turn", found["turn"]) == [
        ["turn", "1", "2", "3"],
        ["a", "new", "kept", "-"],
        ["b", "-", "x", "y"],
    ]
    assert rows_of("restart", found["restart"]) == [["restart", "1"], ["c", "z"]]
    assert "| turn | 1 | 2 |\n| a | old | kept |" in capsys.readouterr().out


def test_a_line_says_what_belongs_beside_every_figure(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    report("turn", {"a": {"1": "x"}}, {"a": [0.5]}, file)
    line = json.loads(file.read_text())
    assert line["values"] == {"a": [0.5]}
    assert {"command", "commit", "cpu_model", "load_average"} <= line["facts"].keys()


def test_ratios_are_of_values_that_were_measured_in_turns() -> None:
    """The machine was ten times slower in the second round."""
    assert against([0.1, 1.0, 0.1], [0.05, 0.5, 0.04]) == "50.0 ms (0.50)"
