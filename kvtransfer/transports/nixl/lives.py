"""What both ways to run an agent have in common: how often it may start, and what must be installed.

Owns the count of crashes. Knows neither processes nor threads.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from baton.kvtransfer.transports.nixl.wire import Ready
from baton.wire.errors import InvalidSetting

_MAX_CRASHES = 5
_CRASH_PERIOD_S = 60.0


class Crashes:
    """The lives that ended by themselves. After `_MAX_CRASHES` of them within `_CRASH_PERIOD_S` seconds, the next start
    waits until the first of them is that long ago."""

    def __init__(self) -> None:
        self.num_crashes = 0
        self._recent_s: deque[float] = deque(maxlen=_MAX_CRASHES)

    @property
    def may_start(self) -> bool:
        """Whether the next life may begin now."""
        return len(self._recent_s) < _MAX_CRASHES or time.monotonic() - self._recent_s[0] > _CRASH_PERIOD_S

    def note(self) -> None:
        """Count a life that ended by itself."""
        self.num_crashes += 1
        self._recent_s.append(time.monotonic())


class RunningAgent(Protocol):
    """One agent after the other, as the node sees them: `process.AgentProcess`, `thread.AgentThread`.

    `ready` is what the agent of this life said when it came up, None while there is none that may be used. A life has
    ended when it reads and writes nothing any more; `num_lives_ended` counts them.
    """

    ready: Ready | None
    num_lives_ended: int

    @property
    def num_crashes(self) -> int:
        """The number of lives that ended by themselves."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether there is a life that has not ended."""
        ...

    @property
    def is_starting(self) -> bool:
        """Whether there is an agent that nobody knows yet."""
        ...

    @property
    def may_start(self) -> bool:
        """Whether the next life may begin as soon as this one has ended: it has not crashed too often."""
        ...

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of commands that the agent has not taken."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """A socket that is readable when `poll` has something to do."""
        ...

    def send(self, command: object) -> None:
        """Give a command to the agent; lost when there is none."""
        ...

    def poll(self) -> list[Any]:
        """Reports that have come, `Ready` of a new life among them. Notices the end of a life and starts the next."""
        ...

    def kill(self) -> None:
        """End this life now. It has ended when `num_lives_ended` has risen, usually before this returns."""
        ...

    def close(self) -> None:
        """End the agent for good."""
        ...


def require_nixl() -> None:
    """Raise `InvalidSetting` when the package is missing."""
    if importlib.util.find_spec("nixl") is None:
        raise InvalidSetting("--kv-transport nixl: nixl is not installed: pip install 'baton-serve[nixl]'")
