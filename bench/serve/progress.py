"""The progress bar of a run, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Told how many requests are done, and of how many."""


@contextmanager
def progress_bar(is_shown: bool) -> Iterator[Progress]:
    """What moves the bar. It appears at the first call, so that what is said before it keeps its own lines."""
    bars: list[tqdm[Any]] = []

    def move(num_done: int, num_requests: int) -> None:
        if not bars:
            bars.append(tqdm(total=num_requests, disable=not is_shown, unit="req"))
        bars[0].update(num_done - bars[0].n)

    try:
        yield move
    finally:
        for bar in bars:
            bar.close()
