"""Goals for latency: what an operator asks for, and what a request may ask for instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goals:
    """Seconds until the first token and between two tokens; 0: as short as possible, and no limit."""

    ttft_s: float
    tpot_s: float


NO_GOALS = Goals(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AllowedGoals:
    """The operator's goals, and the tightest that a request may have of each kind that the operator has."""

    own: Goals
    least: Goals
