from __future__ import annotations

import pytest

from baton.bench.limits.result import in_turns, ratio_of


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
