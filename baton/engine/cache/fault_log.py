"""What is wrong with a store, in the log: once when it begins, and once when all of it is over.

Owns which faults last. A store with a fault is left alone for a while and then tried again, so the same fault comes
back for as long as it lasts. Metrics count each; people are told once. Knows no store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LASTS_S = 60.0
"""A fault that has not come back for so long is over, also where the same thing was not tried again."""
_log = logging.getLogger(__name__)


class FaultLog:
    """The faults of one store. `name`: what people call it. Its calls may come from any thread; what two of them say at
    the same moment may be said twice."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._faults: dict[str, tuple[str, float]] = {}

    def failed(self, what: str, reason: str) -> None:
        """It failed at `what`, which nobody need be told again until it worked. Faults with one reason are one."""
        now_s = self._clock()
        lasting = {each: fault for each, fault in list(self._faults.items()) if now_s - fault[1] < LASTS_S}
        is_known = what in lasting or any(fault[0] == reason for fault in lasting.values())
        self._faults = {**lasting, what: (reason, now_s)}
        if not is_known:
            _log.warning("%s %s", self._name, reason)

    def worked(self, what: str) -> None:
        """It did `what`."""
        if self._faults.pop(what, None) is not None and not self._faults:
            _log.info("%s works again", self._name)
