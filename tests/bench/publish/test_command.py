from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from baton.bench.facts import ROOT
from baton.bench.publish.__main__ import PAGE, Entry, Page, Part, command_lines, main, read_contents, text_of
from baton.bench.report.document import Cell, Table, words
from baton.wire.errors import InvalidSetting
from tests.bench.report.samples import compare_result, sweep_result

CONTENTS = """
opening: pd.md
sections:
- title: Against others
  file: pd.json
  notes: pd.md
  tables: [figures]
  pictures: [attainment, latency]
  html: pd.html
- {title: Goodput, file: sweep.json, tables: [goodput]}
- {title: Words, notes: pd.md}
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `results` (a comparison, a sweep and prose) and `docs`, made of them. Not to be changed."""
    folder = tmp_path_factory.mktemp("published")
    results = folder / "results"
    results.mkdir()
    (results / "pd.json").write_text(json.dumps(compare_result((1, 4), 3)))
    (results / "sweep.json").write_text(json.dumps(sweep_result()))
    (results / "pd.md").write_text("**Where Baton loses.** Here.\n")
    (results / "contents.yaml").write_text(CONTENTS)
    assert run(results) == 0
    return folder


@pytest.fixture
def results(published: Path, tmp_path: Path) -> Path:
    """A copy of the results, with their documents beside it."""
    shutil.copytree(published, tmp_path, dirs_exist_ok=True)
    return tmp_path / "results"


def run(results: Path, *flags: str) -> int:
    return main(["--results", str(results), "--docs", str(results.parent / "docs"), *flags])


def test_the_committed_page_is_what_the_committed_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_has_sections_pictures_and_a_report(published: Path) -> None:
    docs = published / "docs"
    text = (docs / PAGE).read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Against others",
        "## Goodput",
        "## Words",
    ]
    assert text.count("**Where Baton loses.** Here.") == 3
    assert text.index("**Where") < text.index("## ")
    for picture in ("attainment", "latency"):
        assert f"](pictures/pd-{picture}.png)" in text
        assert (docs / "pictures" / f"pd-{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert (docs / "pd.html").read_text().startswith("<!doctype html>")
    assert not list(docs.glob("pictures/*timeline*"))


def test_a_check_writes_nothing_and_sees_what_is_old(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(results, "--check") == 0
    shutil.rmtree(results.parent / "docs")
    assert run(results, "--check") == 1
    assert not (results.parent / "docs").exists()
    assert PAGE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{title: A, file: pd.json, pictures: [strange]}", "no table or picture 'strange', but"),
        ("{title: A, file: pd.json, tables: [strange]}", "no table or picture 'strange', but"),
        ("{title: A, file: none.json}", r"none\.json"),
        ("{title: A, notes: none.md}", r"none\.md"),
    ],
)
def test_a_section_that_cannot_be_made_is_said(results: Path, entry: str, said: str) -> None:
    (results / "contents.yaml").write_text(f"sections:\n- {entry}\n")
    with pytest.raises(InvalidSetting, match=said):
        run(results)


def written(folder: Path, text: str) -> Path:
    path = folder / "contents.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 3", "contents.yaml: "),
        ("a: 1", "sections: Field required"),
        ("sections: [{title: A}]", "'A': a section needs"),
        ("sections: [{title: B, notes: b.md, plots: [x]}]", r"sections\.0\.plots: Unexpected"),
        ("sections: [{title: A, file: 3}]", r"sections\.0\.file: .*string"),
        ("sections: [{title: A, file: a.json, blocks: [x]}]", r"sections\.0\.blocks\.0: "),
        ("- {", "contents.yaml"),
    ],
)
def test_a_mistake_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        read_contents(written(tmp_path, text))


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
