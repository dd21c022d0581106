"""The node that has most of the prompt cached, unless it is much busier than others."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.base import CandidateT, num_cached_blocks

_MAX_EXTRA_LOAD = 8


class Prefix:
    """Longest expected cached prefix, then load. A node with more than `_MAX_EXTRA_LOAD` legs above the least loaded
    one is passed over: a popular prefix must not send everybody to the same node."""

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """See `Policy`."""
        limit = min(node.load for node in candidates) + _MAX_EXTRA_LOAD
        fit = [node for node in candidates if node.load <= limit]
        return min(fit, key=lambda node: (-num_cached_blocks(node, prompt_hashes), node.load))
