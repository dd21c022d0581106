from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.limits import command
from bench.limits.command import main
from bench.limits.result import Ceiling, Found, Ratio
from bench.limits.settings import ENGINE_NAMES, LimitsSettings
from wire.errors import InvalidSetting, RequestFailed


def test_a_quick_run_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "limits.json"
    assert main(["--quick", "--only", ",".join(ENGINE_NAMES), "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["kind", "facts", "setup", "ceilings", "ratios", "failures"]
    assert found["kind"] == "limits"
    assert found["facts"]["command"].startswith("baton bench limits --quick --only memcpy,")
    assert found["setup"]["rounds"] == 2
    measured = {one["name"] for one in (*found["ceilings"], *found["ratios"])}
    assert measured == set(ENGINE_NAMES)
    assert {tuple(ceiling) for ceiling in found["ceilings"]} == {("name", "value", "unit", "spread", "note")}
    keys = ("name", "case", "value", "low", "high", "unit", "goal", "noisy", "note")
    assert {tuple(ratio) for ratio in found["ratios"]} == {keys}
    shown = capsys.readouterr()
    assert all(f"\n| {name}" in shown.out for name in ENGINE_NAMES)
    assert "measuring: attn_ratio, batch 2, context 32" in shown.err


def test_one_half_that_fails_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RequestFailed("it broke")

    def works(settings: LimitsSettings, found: Found, say: object) -> None:
        found.ceilings.append(Ceiling("zmq_round_trip", 80.0, "us", 0.1))
        found.ratios.append(Ratio("handover_us", "idle", 500.0, 400.0, 600.0, "us"))

    monkeypatch.setattr(command, "engine_limits", fails)
    monkeypatch.setattr(command, "system_limits", works)
    path = tmp_path / "limits.json"
    assert main(["--quick", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert found["failures"] == ["engine limits: it broke"]
    assert [ratio["name"] for ratio in found["ratios"]] == ["handover_us"]
    assert "engine limits: it broke" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "/nowhere/limits.json"], "--json /nowhere/limits.json: there is no such folder"),
        (["--only", "speed"], "--only 'speed' is not one of"),
    ],
)
def test_what_cannot_be_used_is_noticed_before_measuring(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "engine_limits", lambda *_: pytest.fail("it measured"))
    with pytest.raises(InvalidSetting, match=message):
        main(["--quick", *arguments])
