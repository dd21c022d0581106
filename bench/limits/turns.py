"""Two things measured in turns, so that whatever else the machine does meets both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turns:
    """Values of a yardstick and of what is compared with it, pair by pair."""

    ceiling: list[float]
    subject: list[float]


def in_turns(num_rounds: int, ceiling: Callable[[], float], subject: Callable[[], float]) -> Turns:
    """`num_rounds` pairs, one first and then the other; a pair before them warms up and is forgotten."""
    pairs = [(ceiling(), subject()) for _ in range(1 + num_rounds)][1:]
    return Turns([pair[0] for pair in pairs], [pair[1] for pair in pairs])
