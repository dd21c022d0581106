from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.limits import command
from baton.bench.limits.command import main
from baton.bench.limits.result import Ceiling, Found, LimitsSettings, Ratio
from baton.wire.errors import InvalidSetting, RequestFailed


def test_one_half_that_fails_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RequestFailed("it broke")

    def works(settings: LimitsSettings, found: Found, say: object) -> None:
        found.ceilings.append(Ceiling("zmq_round_trip", 80.0, "us", 0.1))
        found.ratios.append(Ratio("handover_us", "idle", 500.0, 400.0, 600.0, "us", noisy=True))

    monkeypatch.setattr(command, "engine_limits", fails)
    monkeypatch.setattr(command, "system_limits", works)
    path = tmp_path / "limits.json"
    assert main(["--quick", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert list(found) == ["kind", "facts", "setup", "ceilings", "ratios", "failures"]
    assert found["kind"] == "limits"
    assert found["facts"]["command"].startswith("baton bench limits --quick --json ")
    assert found["setup"]["rounds"] == 2
    assert found["failures"] == ["engine limits: it broke"]
    assert [(ratio["name"], ratio["value"]) for ratio in found["ratios"]] == [("handover_us", 500.0)]
    assert set(found["ceilings"][0]) == {"name", "value", "unit", "spread", "note"}
    assert {*found["ratios"][0]} == {"name", "case", "value", "low", "high", "unit", "goal", "noisy", "note"}
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
