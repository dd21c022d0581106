"""The progress of a download where nobody watches a terminal: a line every few seconds.

Owns how often. What is downloaded is the hub client's to say. Invariant: a download that is over says nothing more.
"""

from __future__ import annotations

import io
import math
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

if TYPE_CHECKING:
    _Bar = tqdm[NoReturn]
else:
    _Bar = tqdm  # a generic class for type checkers alone

INTERVAL_S = 5.0


class DownloadLines(_Bar):
    """A bar of the hub client's that is shown as lines on stderr."""

    interval_s = INTERVAL_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._next_s = time.monotonic() + self.interval_s
        form = "{desc}: {n_fmt} of {total_fmt} [{elapsed}, {remaining} left, {rate_fmt}]"
        # what tqdm writes itself are carriage returns, and when it is time is decided here
        own = {"file": io.StringIO(), "bar_format": form, "mininterval": 0.0, "miniters": 1}
        super().__init__(*arguments, **{**options, **own})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Called by tqdm when it thinks that something new can be seen."""
        now_s = time.monotonic()
        # the client closes bars of what is over late, or never
        if 0 < self.n < (self.total or math.inf) and now_s >= self._next_s:
            self._next_s = now_s + self.interval_s
            sys.stderr.write(f"{self}\n")
            sys.stderr.flush()


def progress_class() -> type[DownloadLines] | None:
    """What the hub client shows a download with; None: its own bars, on a terminal, or none if nobody wants any."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS

    return None if sys.stderr.isatty() or HF_HUB_DISABLE_PROGRESS_BARS else DownloadLines
