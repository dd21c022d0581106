"""How long to wait before a program that has ended is started again.

Owns the count of its ends in a row, and the delays. Knows neither processes nor who starts them.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_RESTART_DELAY_S = 0.5
MAX_RESTART_DELAY_S = 10.0
STABLE_AFTER_S = 30.0
"""The end of a program that lived this long is the first in a row."""
_MAX_DOUBLINGS = 16


@dataclass(slots=True)
class Backoff:
    """The delays of one program between its restarts.

    After the first end it starts again at once. `first_delay_s`: from its second end in a row to its next start;
    doubled each time after that, up to `MAX_RESTART_DELAY_S`.
    """

    first_delay_s: float = FIRST_RESTART_DELAY_S
    num_failures: int = 0
    """Its ends in a row."""
    started_s: float = 0.0

    def start(self, now_s: float) -> None:
        """Note that the program is started now."""
        self.started_s = now_s

    def fail(self, now_s: float) -> float:
        """Note that the program has ended. Returns the seconds until it should be started again."""
        is_first = now_s - self.started_s >= STABLE_AFTER_S
        self.num_failures = 1 if is_first else self.num_failures + 1
        if self.num_failures == 1:
            return 0.0
        num_doublings = min(self.num_failures - 2, _MAX_DOUBLINGS)
        return min(self.first_delay_s * (1 << num_doublings), MAX_RESTART_DELAY_S)
