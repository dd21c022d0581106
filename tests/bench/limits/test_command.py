from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.documents import LimitsDocument, load_result
from baton.bench.limits import command
from baton.bench.limits.command import main, report
from baton.bench.limits.result import CEILING_NAMES, MEANINGS, NAMES, Ceiling, LimitsSettings, Ratio
from baton.wire.errors import InvalidSetting, RequestFailed
from tests.bench.report.samples import FACTS


def test_what_fails_leaves_what_was_measured_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(settings: LimitsSettings, found: LimitsDocument, say: object) -> None:
        found.ceilings.append(Ceiling("memcpy", 80.0, "GB/s", 0.1))
        found.ratios.append(Ratio("prefill_flop_ratio", "idle", 0.5, 0.4, 0.6, noisy=True))
        raise RequestFailed("it broke")

    monkeypatch.setattr(command, "engine_limits", breaks)
    path = tmp_path / "limits.json"
    assert main(["--quick", "--json", str(path)]) == 1
    found = load_result(path).document
    assert isinstance(found, LimitsDocument)
    assert found.facts.command.startswith("baton bench limits --quick --json ")
    assert (found.setup["rounds"], found.failures) == (2, ["it broke"])
    assert [(ratio.name, ratio.value) for ratio in found.ratios] == [("prefill_flop_ratio", 0.5)]
    assert [ceiling.name for ceiling in found.ceilings] == ["memcpy"]
    assert "it broke" in capsys.readouterr().out


def test_a_file_without_a_folder_is_noticed_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "engine_limits", lambda *_: pytest.fail("it measured"))
    with pytest.raises(InvalidSetting, match=r"--json /nowhere/limits\.json: there is no such folder"):
        main(["--quick", "--json", "/nowhere/limits.json"])


CEILING = Ceiling("read_stream", 24.53, "GB/s", 0.034, "how it reads")
STEADY = Ratio("decode_bw_ratio", "batch 1, context 512", 0.613, 0.58, 0.655, goal="1", note="3 ms a step")
NOISY = Ratio("prefill_flop_ratio", "batch 8, context 512", 0.4321, 0.2, 0.9, goal="1", noisy=True)
IN_US = Ratio("prefill_flop_ratio", "idle", 45.67, 0.0123, 345.6, unit="us")


def line(shown: str, name: str) -> list[str]:
    """The cells of the first row that begins with `name`."""
    found = next(line for line in shown.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_ratio_has_value_range_and_goal() -> None:
    shown = report(LimitsDocument(FACTS, {"threads": 1}, [CEILING], [STEADY, IN_US]))
    assert line(shown, "decode_bw_ratio") == [
        "decode_bw_ratio",
        "batch 1, context 512",
        "0.61",
        "0.58 to 0.66",
        "1",
        "3 ms a step",
    ]
    assert line(shown, "prefill_flop_ratio") == ["prefill_flop_ratio", "idle", "45.7 us", "0.01 to 346", "", ""]
    assert line(shown, "read_stream") == ["read_stream", "24.5 GB/s", "3 %", "how it reads"]


def test_no_value_is_shown_for_a_noisy_ratio() -> None:
    shown = report(LimitsDocument(FACTS, {}, [CEILING], [STEADY, NOISY]))
    assert line(shown, "prefill_flop_ratio") == ["prefill_flop_ratio", "batch 8, context 512", "noisy", "", "1", ""]
    assert "0.43" not in shown
    assert "Noisy: the yardstick itself moved too much" in shown


def test_every_ratio_has_an_explanation() -> None:
    assert set(MEANINGS) == {*NAMES} - {*CEILING_NAMES}
