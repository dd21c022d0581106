from __future__ import annotations

from pathlib import Path

import pytest

from bench.publish.contents import Entry, read_contents
from wire.errors import InvalidSetting


def written(folder: Path, text: str) -> Path:
    path = folder / "contents.yaml"
    path.write_text(text)
    return path


def test_sections_come_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "- {title: A, file: a.json, pictures: [gaps], blocks: [8]}\n- {title: B, notes: b.md}\n")
    assert read_contents(path) == [
        Entry("A", file="a.json", pictures=("gaps",), blocks=(8,)),
        Entry("B", notes="b.md"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1", "list of sections"),
        ("- 3", "list of sections"),
        ("- {title: A}", "section 1: a section needs"),
        ("- {notes: a.md}", "section 1: a section needs"),
        ("- {title: A, notes: a.md}\n- {title: B, notes: b.md, plots: [x]}", "section 2: unknown key 'plots'"),
        ("- {title: A, file: 3}", "file is not text"),
        ("- {title: A, file: a.json, pictures: gaps}", "pictures is not a list"),
        ("- {title: A, file: a.json, blocks: [x]}", "blocks is not a list"),
        ("- {", "contents.yaml"),
    ],
)
def test_a_mistake_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        read_contents(written(tmp_path, text))


def test_a_list_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        read_contents(tmp_path / "contents.yaml")
