"""Each node in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import CandidateT


class RoundRobin:
    """Ignores load and caches: the yardstick for the others."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """See `Policy`."""
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]
