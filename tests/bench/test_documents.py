from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from baton.bench.documents import CompareDocument, MeasuredTarget, SweepDocument, begun, save
from baton.bench.runs import Run
from baton.wire.errors import InvalidSetting
from tests.bench.compare.results import result, run
from tests.bench.report.samples import FACTS


def new() -> CompareDocument:
    return CompareDocument(facts=FACTS, targets=[MeasuredTarget("a", url="http://x:1")], runs=[], ratios=[])


def begin(path: Path | None, *arguments: str, is_resumed: bool = True) -> CompareDocument:
    return begun(path, new(), arguments, is_resumed=is_resumed)


def test_a_file_is_gone_on_with_by_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document = begin(path, "--rounds=3")
    document.runs += [run("a", 1, 5.0), run("a", 1, 5.0, rate=math.inf)]
    save(path, document)
    assert [entry["rate"] for entry in json.loads(path.read_text())["runs"]] == [1.0, "inf"]
    again = begin(path, "--rounds=3")
    assert again.runs == document.runs
    assert [found.time for found in again.sessions] == [FACTS.time] * 2


def test_a_file_of_other_settings_or_damaged_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    save(path, begin(path, "--rounds=3", "--seed=1"))
    with pytest.raises(InvalidSetting, match=r"other settings \(--rounds=3, --rounds=5\)"):
        begin(path, "--rounds=5", "--seed=1")
    sweep = SweepDocument(facts=FACTS, slo={}, attainment=0.9, configurations=[])
    with pytest.raises(InvalidSetting, match=r"kind: .*name another file, or begin anew with --no-resume"):
        begun(path, sweep, ["--rounds=3", "--seed=1"], is_resumed=True)
    assert begin(path, "--rounds=5", is_resumed=False).arguments == ["--rounds=5"]
    path.write_text("{")
    with pytest.raises(InvalidSetting, match="--no-resume"):
        begin(path)
    assert path.read_text() == "{"


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path, document = tmp_path / "result.json", new()
    document.runs = [run("a", 1, 5.0), run("a", 2, 5.0)]
    save(path, document)
    before = path.read_text()
    document.runs.append(Run("a", 3, 1.0, result(math.nan)))
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(path, document)
    assert path.read_text() == before
