from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.publish.__main__ import Contents, Entry, read_contents
from baton.wire.errors import InvalidSetting


def written(folder: Path, text: str) -> Path:
    path = folder / "contents.yaml"
    path.write_text(text)
    return path


def test_sections_come_in_order(tmp_path: Path) -> None:
    text = "sections:\n- {title: A, file: a.json, pictures: [gaps], blocks: [8]}\n- {title: B, notes: b.md}\n"
    entries = (Entry("A", file="a.json", pictures=("gaps",), blocks=(8,)), Entry("B", notes="b.md"))
    assert read_contents(written(tmp_path, text)) == Contents(entries)


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
