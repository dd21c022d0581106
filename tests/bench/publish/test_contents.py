from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.publish.__main__ import read_contents
from baton.wire.errors import InvalidSetting


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
