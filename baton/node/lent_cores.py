"""When a node lends its cores to the other nodes of its machine.

Owns the rule. Does not know how cores are lent (`baton.engine.native.loans`) or what a step computes.

Cores are lent while the engine waits for something to do. A decode node lends them between its steps too while a
prefill node computes that has threads there: tokens then come in larger batches, a little later and for less work.
"""

from __future__ import annotations

import math
from typing import Protocol

BELIEVED_S = 10.0
"""How long after it has said so another node is taken to compute: it may have died or been stopped."""

_STEPS_OF_REST = 2.0
"""A rest is so many times as long as the step before it: the other node then has two thirds of the cores."""


class Loans(Protocol):
    """The means to lend a node's cores to other nodes: `baton.engine.native.loans.CoreLoans`, or its double in
    tests."""

    def give(self, for_s: float = -1.0) -> None: ...

    def take_back(self) -> None: ...

    def is_wanted(self, within_s: float) -> bool: ...


class LentCores:
    """The cores of a node; without `loans` they are its own all the time. `max_rest_s`: after a step; `goal_tpot_s`:
    for a step and its rest, 0: none."""

    def __init__(self, loans: Loans | None, max_rest_s: float = 0.0, goal_tpot_s: float = 0.0) -> None:
        self._loans = loans
        self._max_rest_s = max_rest_s
        self._goal_s = goal_tpot_s or math.inf

    def lend(self, for_s: float = -1.0) -> None:
        """The engine waits, for so long, or until something comes when it is negative."""
        if self._loans is not None:
            self._loans.give(for_s)

    def take_back(self) -> None:
        """Lend no more cores: the engine goes on."""
        if self._loans is not None:
            self._loans.take_back()

    def rest_s(self, step_s: float) -> float:
        """How long the engine rests after a step that took so long, because another node wants the cores."""
        if not self._max_rest_s or self._loans is None or not self._loans.is_wanted(BELIEVED_S):
            return 0.0
        return max(0.0, min(_STEPS_OF_REST * step_s, self._max_rest_s, self._goal_s - step_s))
