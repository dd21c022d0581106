from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.limits.result import NAMES, LimitsSettings, in_turns, last_cache_bytes, ratio_of
from baton.wire.errors import InvalidSetting


def test_a_ratio_is_of_medians_and_its_range_of_pairs() -> None:
    found = ratio_of("r", "case", [5.0, 6.0, 4.0], [10.0, 10.0, 10.5], goal="1")
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((4 / 10.5, 0.6))
    assert not found.noisy


@pytest.mark.parametrize(("ceiling", "noisy"), [([10.0, 11.4], False), ([10.0, 12.5], True)])
def test_a_ratio_is_noisy_when_its_ceiling_was_unsteady_and_keeps_its_value(ceiling: list[float], noisy: bool) -> None:
    found = ratio_of("r", "case", [5.0, 5.0], ceiling)
    assert found.noisy == noisy
    assert ("the ceiling spread by" in found.note) == noisy
    assert found.value > 0


def test_both_are_measured_in_turns_and_the_warm_up_is_forgotten() -> None:
    asked: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    assert in_turns(2, lambda: measure("ceiling"), lambda: measure("subject")) == ([3.0, 5.0], [4.0, 6.0])
    assert asked == ["ceiling", "subject"] * 3


DEFAULT = LimitsSettings()


def test_everything_is_measured_unless_some_are_named() -> None:
    assert DEFAULT.names == NAMES
    some = LimitsSettings(only="prefill_flop_ratio, memcpy")
    assert some.names == ("memcpy", "prefill_flop_ratio")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"only": "speed"}, "--only 'speed' is not one of memcpy, "),
        ({"cores": "4096"}, "--cores 4096 are not some of"),
        ({"batches": "1,x"}, "--batches: '1,x' is not a list of numbers from 1 on"),
    ],
)
def test_what_cannot_be_used_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        replace(DEFAULT, **change).check()  # type: ignore[arg-type]


def test_no_cache_holds_a_buffer(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "65536K", "strange")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 2**26
    assert last_cache_bytes(tmp_path / "nothing") == 0
    assert DEFAULT.buffer_bytes >= max(2**27, min(4 * last_cache_bytes(), 2**31))
    assert LimitsSettings(quick=True).buffer_bytes < 2**24
