"""The node with the fewest legs in flight."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import CandidateT


class LeastLoaded:
    """Ignores caches. The first of equals wins."""

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """See `Policy`."""
        return min(candidates, key=lambda node: node.load)
