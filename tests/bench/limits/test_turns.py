from __future__ import annotations

from bench.limits.turns import in_turns


def test_both_are_measured_in_turns_and_the_warm_up_is_forgotten() -> None:
    asked: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        return float(len(asked))

    turns = in_turns(2, lambda: measure("ceiling"), lambda: measure("subject"))
    assert asked == ["ceiling", "subject"] * 3
    assert (turns.ceiling, turns.subject) == ([3.0, 5.0], [4.0, 6.0])
