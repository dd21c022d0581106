"""Arithmetic on block lists: which neighbouring blocks can move as one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that lie next to each other on both sides, starting at `source` and `target`."""

    source: int
    target: int
    count: int


def coalesce(sources: Sequence[int], targets: Sequence[int], max_count: int) -> list[Run]:
    """Join moves sources[i] -> targets[i] whose neighbours are neighbours on both sides, at most `max_count` a run."""
    if not sources:
        return []
    source, target = np.asarray(sources), np.asarray(targets)
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source)]
    runs = []
    for begin, end in pairwise(edges):
        for first in range(begin, end, max_count):
            runs.append(Run(int(source[first]), int(target[first]), min(max_count, end - first)))
    return runs
