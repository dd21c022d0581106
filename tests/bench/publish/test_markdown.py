from __future__ import annotations

import shlex

import pytest

from bench.publish.markdown import command_lines, escaped, table_lines
from bench.report.document import Cell, Table, words


def test_a_table_keeps_its_cells_apart() -> None:
    table = Table("figures", "1 | 2", ("", "a|b", "left"), ((words("x"), Cell("1", "0 | 2"), Cell("<b>")),))
    table = Table(table.name, table.title, table.heads, table.rows, words=frozenset({"left"}))
    assert list(table_lines(table))[2:5] == [
        "|  | a\\|b | left |",
        "| --- | ---: | --- |",
        "| x | 1 (0 \\| 2) | &lt;b> |",
    ]


def test_text_from_files_is_shown_as_it_is() -> None:
    assert escaped("a *b* `c` [d](e)\n<f>") == r"a \*b\* \`c\` \[d\](e) &lt;f>"


@pytest.mark.parametrize(
    "command",
    ["baton bench kv", "baton bench compare " + " ".join(f"--target 'n {n}=baton serve x'" for n in range(9))],
)
def test_a_long_command_is_still_one_command(command: str) -> None:
    lines = command_lines(command)
    assert all(len(line) <= 115 for line in lines)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)


def test_a_command_that_no_shell_takes_is_shown_anyway() -> None:
    assert command_lines("baton 'bench") == ["baton 'bench"]
