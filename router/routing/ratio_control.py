"""Ratio control: how many mixed nodes prefer to compute prompts, and how many to generate, over minutes.

Owns the decision for one model, from how many requests have met their goals in one window after another. Knows nodes by
three numbers, and neither clocks nor messages. When first tokens come too late while streams keep their pace, a node
that generates is to compute prompts, and the other way round; when both miss their goals there is too much to do, and
nothing that a change could mend.

Hysteresis: what is wrong has to be so in several windows in a row, more of them for a change that takes the last one
back. After a change some windows are not looked at, because requests of before end in them. One change at a time, and
of each kind one node is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.wire.messages import DECODE, PREFILL

MISSED, MET = 0.9, 0.93
"""Below the first share a goal is missed, from the second on it is met with something to spare."""
MIN_REQUESTS = 10
"""A window with fewer says nothing."""
_WINDOWS, _WINDOWS_BACK, _SETTLING = 2, 6, 2


class Window(NamedTuple):
    """First tokens, and those in time; streams, and those that kept their pace. Refused requests count as missed."""

    num_first: int
    num_in_time: int
    num_streams: int
    num_kept_pace: int


class MixedNode(NamedTuple):
    """A node whose preference may change."""

    epoch: int
    preference: str
    load: int


@dataclass(frozen=True, slots=True)
class Change:
    """The node of that epoch is to prefer another role."""

    epoch: int
    preference: str
    reason: str


class RatioControl:
    """See the module."""

    def __init__(self) -> None:
        self._wanted = ""
        self._num_windows = 0
        self._num_settling = 0
        self._last = ""

    def decide(self, window: Window, nodes: Sequence[MixedNode]) -> Change | None:
        """The change to make at the end of a window, if any."""
        if self._num_settling:
            self._num_settling -= 1
            return None
        wanted = _wanted(window)
        self._num_windows = self._num_windows + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if not wanted or self._num_windows < (_WINDOWS_BACK if self._last not in ("", wanted) else _WINDOWS):
            return None
        others = [node for node in nodes if node.preference != wanted]
        if len(others) < 2:
            return None
        chosen = min(others, key=lambda node: node.load)
        self._last, self._num_settling, self._num_windows = wanted, _SETTLING, 0
        return Change(chosen.epoch, wanted, "late_first_tokens" if wanted == PREFILL else "slow_streams")


def _wanted(window: Window) -> str:
    """The role of which there is too little, "" when that is neither or both."""
    if window.num_first < MIN_REQUESTS or window.num_streams < MIN_REQUESTS:
        return ""
    in_time, kept_pace = window.num_in_time / window.num_first, window.num_kept_pace / window.num_streams
    if in_time < MISSED and kept_pace >= MET:
        return PREFILL
    return DECODE if kept_pace < MISSED and in_time >= MET else ""
