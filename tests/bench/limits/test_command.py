from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.limits import command
from baton.bench.limits.command import main
from baton.bench.limits.result import Ceiling, Found, LimitsSettings, Ratio
from baton.wire.errors import InvalidSetting, RequestFailed


def test_what_fails_leaves_what_was_measured_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(settings: LimitsSettings, found: Found, say: object) -> None:
        found.ceilings.append(Ceiling("memcpy", 80.0, "GB/s", 0.1))
        found.ratios.append(Ratio("attn_ratio", "idle", 0.5, 0.4, 0.6, noisy=True))
        raise RequestFailed("it broke")

    monkeypatch.setattr(command, "engine_limits", breaks)
    path = tmp_path / "limits.json"
    assert main(["--quick", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert list(found) == ["kind", "facts", "setup", "ceilings", "ratios", "failures"]
    assert found["kind"] == "limits"
    assert found["facts"]["command"].startswith("baton bench limits --quick --json ")
    assert found["setup"]["rounds"] == 2
    assert found["failures"] == ["it broke"]
    assert [(ratio["name"], ratio["value"]) for ratio in found["ratios"]] == [("attn_ratio", 0.5)]
    assert set(found["ceilings"][0]) == {"name", "value", "unit", "spread", "note"}
    assert {*found["ratios"][0]} == {"name", "case", "value", "low", "high", "unit", "goal", "noisy", "note"}
    assert "it broke" in capsys.readouterr().out


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
