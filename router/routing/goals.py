"""Goals for latency: what an operator asks for, what a request may ask for instead, and how many requests met them.

Owns the counts. What counts is what the router sees: the time until a first token is taken from the relay, and the mean
time between the tokens of a stream that ended well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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


class Window(NamedTuple):
    """First tokens, and those in time; streams, and those that kept their pace. Refused requests count as missed."""

    num_first: int
    num_in_time: int
    num_streams: int
    num_kept_pace: int


@dataclass(slots=True)
class Attainment:
    """How many requests of one model have met their goals, since the router started. `own`: the goals of requests
    without goals of theirs; a goal of 0 is always met."""

    own: Goals = NO_GOALS
    num_first: int = 0
    num_in_time: int = 0
    num_streams: int = 0
    num_kept_pace: int = 0
    num_late_refused: int = 0
    num_slow_refused: int = 0

    def first(self, ttft_s: float, goals: Goals | None) -> None:
        """A first token has come."""
        goal_s = (goals or self.own).ttft_s
        self.num_first += 1
        self.num_in_time += not goal_s or ttft_s <= goal_s

    def ended(self, tpot_s: float, goals: Goals | None) -> None:
        """A stream has ended whose tokens came so far apart."""
        goal_s = (goals or self.own).tpot_s
        self.num_streams += 1
        self.num_kept_pace += not goal_s or tpot_s <= goal_s

    def refused(self, *, is_slow: bool) -> None:
        """A request was refused, because no node would keep its pace, or else because it would begin too late."""
        self.num_slow_refused += is_slow
        self.num_late_refused += not is_slow

    @property
    def total(self) -> Window:
        """All of it as one window."""
        return Window(
            self.num_first + self.num_late_refused,
            self.num_in_time,
            self.num_streams + self.num_slow_refused,
            self.num_kept_pace,
        )
