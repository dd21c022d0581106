from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.compare.result_file import begin, save
from bench.facts import Facts
from wire.errors import InvalidSetting

FACTS = Facts("2026-01-02 03:04 UTC", "baton bench x", "abc", "cpu", 2, (0, 1), 2**30, "Linux", 0.5, {})


def test_a_file_is_gone_on_with_by_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document, session = begin(path, "compare", ["--rounds=3"], FACTS, is_resumed=True)
    assert session == 0
    save(path, {**document, "runs": [{"round": 1}]})
    document, session = begin(path, "compare", ["--rounds=3"], FACTS, is_resumed=True)
    assert session == 1
    assert document["runs"] == [{"round": 1}]
    assert [found["time"] for found in document["sessions"]] == [FACTS.time] * 2


def test_a_file_of_other_settings_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document, _ = begin(path, "compare", ["--rounds=3", "--seed=1"], FACTS, is_resumed=True)
    save(path, document)
    with pytest.raises(InvalidSetting, match=r"other settings \(--rounds=3, --rounds=5\)"):
        begin(path, "compare", ["--rounds=5", "--seed=1"], FACTS, is_resumed=True)
    with pytest.raises(InvalidSetting, match="holds something else"):
        begin(path, "sweep", ["--rounds=3", "--seed=1"], FACTS, is_resumed=True)
    document, session = begin(path, "compare", ["--rounds=5"], FACTS, is_resumed=False)
    assert (document["arguments"], session) == (["--rounds=5"], 0)


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "compare"}'])
def test_a_file_of_somebody_else_is_not_written_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(InvalidSetting, match=str(path)):
        begin(path, "compare", [], FACTS, is_resumed=True)
    assert path.read_text() == content


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no such folder"):
        begin(tmp_path / "no" / "result.json", "compare", [], FACTS, is_resumed=True)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(path, {"runs": [{"round": 1}, {"round": 2}]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(path, {"runs": [{"round": math.nan}]})
    assert json.loads(path.read_text()) == {"runs": [{"round": 1}, {"round": 2}]}
    assert path.read_text().splitlines()[2] == '{"round": 1},'


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document, session = begin(None, "compare", [], FACTS, is_resumed=True)
    save(None, document)
    assert session == 0
    assert list(tmp_path.iterdir()) == []
