from __future__ import annotations

from baton.bench.facts import Facts
from baton.bench.limits.command import report
from baton.bench.limits.result import CEILING_NAMES, MEANINGS, NAMES, Ceiling, Found, Ratio

FACTS = Facts("2026-01-01 00:00 UTC", "baton bench limits", "abc", "A CPU", 2, (0, 1), 2**30, "Linux 6", 0.5, {})
CEILING = Ceiling("read_stream", 24.53, "GB/s", 0.034, "how it reads")
STEADY = Ratio("decode_bw_ratio", "batch 1, context 512", 0.613, 0.58, 0.655, goal="1", note="3 ms a step")
NOISY = Ratio("attn_ratio", "batch 8, context 512", 0.4321, 0.2, 0.9, goal="1", noisy=True)
IN_US = Ratio("attn_ratio", "idle", 45.67, 0.0123, 345.6, unit="us")


def line(shown: str, name: str) -> list[str]:
    """The cells of the first row that begins with `name`."""
    found = next(line for line in shown.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_ratio_has_value_range_and_goal() -> None:
    shown = report(FACTS, {"threads": 1}, Found([CEILING], [STEADY, IN_US], []))
    assert line(shown, "decode_bw_ratio") == [
        "decode_bw_ratio",
        "batch 1, context 512",
        "0.61",
        "0.58 to 0.66",
        "1",
        "3 ms a step",
    ]
    assert line(shown, "attn_ratio") == ["attn_ratio", "idle", "45.7 us", "0.01 to 346", "", ""]
    assert line(shown, "read_stream") == ["read_stream", "24.5 GB/s", "3 %", "how it reads"]


def test_no_value_is_shown_for_a_noisy_ratio() -> None:
    shown = report(FACTS, {}, Found([CEILING], [STEADY, NOISY], []))
    assert line(shown, "attn_ratio") == ["attn_ratio", "batch 8, context 512", "noisy", "", "1", ""]
    assert "0.43" not in shown
    assert "Noisy: the yardstick itself moved too much" in shown


def test_every_ratio_has_an_explanation() -> None:
    assert set(MEANINGS) == {*NAMES} - {*CEILING_NAMES}
