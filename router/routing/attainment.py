"""How many requests of a model have met their goals for latency, since the router started.

Owns the counts. What counts is what the router sees: the time until a first token is taken from the relay, and the mean
time between the tokens of a stream that ended well.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.routing.goals import NO_GOALS, Goals
from baton.router.routing.ratio_control import Window


@dataclass(slots=True)
class Attainment:
    """See the module. `own`: the goals of requests without goals of theirs; a goal of 0 is always met."""

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
