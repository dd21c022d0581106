"""What all liars have in common; see `__main__`."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from baton.wire.errors import TransferFailed

_GOOD_EVERY = 25


class Liars:
    """Attacks one victim. `longest_s`: the longest poll of it; `refused`: how often it said no, by its reason."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.longest_s = 0.0
        self.num_acts = self.num_good = 0
        self.refused: Counter[str] = Counter()

    def lie(self) -> None:
        """One attempt."""
        raise NotImplementedError

    def do_good(self) -> None:
        """A good peer hands blocks over. Raises `AssertionError`."""
        raise NotImplementedError

    def close(self) -> None:
        """End victim and peers."""

    def timed(self, poll: Callable[[], Any]) -> Any:
        """Call what a transfer thread calls."""
        begun_s = time.monotonic()
        try:
            return poll()
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lie, and do good now and then. Raises `AssertionError`."""
        while not is_over():
            try:
                self.lie()
            except TransferFailed as error:
                self.refused[str(error).partition(":")[0][:60]] += 1
            self.num_acts += 1
            if self.num_acts % _GOOD_EVERY == 0:
                self.do_good()
                self.num_good += 1
