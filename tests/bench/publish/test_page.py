from __future__ import annotations

import shlex

import pytest

from baton.bench.facts import ROOT
from baton.bench.publish.__main__ import Entry, Page, Part, command_lines, text_of
from baton.bench.report.document import Cell, Table, words


def test_a_table_keeps_its_cells_apart() -> None:
    cells = (words("x"), Cell("1", "0 | 2"), Cell("<b>"))
    table = Table("figures", "1 | 2", ("", "a|b", "left"), (cells,), words=frozenset({"left"}), note="of *all*")
    text = text_of(Page("", (Part(Entry("A", notes="n.md"), "", "prose *stays*", tables=(table,)),)))
    assert text[text.index("## A") :].splitlines() == [
        "## A",
        "",
        "**1 \\| 2**",
        "",
        "|  | a\\|b | left |",
        "| --- | ---: | --- |",
        "| x | 1 (0 \\| 2) | &lt;b> |",
        "",
        "of \\*all\\*",
        "",
        "prose *stays*",
    ]


@pytest.mark.parametrize(
    "command",
    ["baton bench kv", "baton bench compare " + " ".join(f"--target 'n {n}=baton serve x'" for n in range(9))],
)
def test_a_long_command_is_still_one_command(command: str) -> None:
    lines = command_lines(command)
    assert all(len(line) <= 115 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)


def test_templates_are_part_of_the_package() -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    assert '"report/*.j2"' in listed
    assert '"publish/*.j2"' in listed
    assert '"plots/*.mplstyle"' in listed
