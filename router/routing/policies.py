"""Policies: which of several nodes takes a leg, chosen by name.

All that a policy sees of a node is how many legs it has and what its prefix cache is expected to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Protocol, TypeVar

from baton.wire.errors import InvalidSetting

_MAX_EXTRA_LOAD = 8


class Candidate(Protocol):
    """A node that could take a leg."""

    @property
    def load(self) -> int:
        """Legs it has been given and not finished."""
        ...

    @property
    def cached_hashes(self) -> AbstractSet[bytes]:
        """Block hashes its prefix cache is known to hold."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Policy(Protocol):
    """Chooses one of several nodes for one leg."""

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """One of `candidates` (at least one, in a stable order); `prompt_hashes` are the prompt's blocks in order."""
        ...


class Prefix:
    """Longest expected cached prefix, then load. A node with more than `_MAX_EXTRA_LOAD` legs above the least loaded
    one is passed over: a popular prefix must not send all requests to the same node."""

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """The candidate with the most of the prompt cached that is not too busy."""
        by_load = sorted(candidates, key=attrgetter("load"))
        chosen, limit = by_load[0], by_load[0].load + _MAX_EXTRA_LOAD
        most = num_cached_blocks(chosen, prompt_hashes)
        for node in by_load:
            if most == len(prompt_hashes) or node.load > limit:
                break
            # one look tells a node that cannot have more, however long the prompt is
            if prompt_hashes[most] in node.cached_hashes and num_cached_blocks(node, prompt_hashes) > most:
                chosen, most = node, num_cached_blocks(node, prompt_hashes)
        return chosen


class LeastLoaded:
    """The node with the fewest legs in flight. Ignores caches. The first of equals wins."""

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """The first candidate with the fewest legs."""
        return min(candidates, key=lambda node: node.load)


class RoundRobin:
    """Each node in turn. Ignores load and caches: a baseline for the other policies."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[CandidateT], prompt_hashes: Sequence[bytes]) -> CandidateT:
        """The candidate behind the one that was chosen last."""
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)]


POLICIES: dict[str, type[Policy]] = {"prefix": Prefix, "least_loaded": LeastLoaded, "round_robin": RoundRobin}


def make_policy(name: str) -> Policy:
    """A new policy of that name. Raises `InvalidSetting`."""
    if name not in POLICIES:
        raise InvalidSetting(f"policy {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def num_cached_blocks(candidate: Candidate, prompt_hashes: Sequence[bytes]) -> int:
    """Blocks of the prompt's beginning that the node is expected to have."""
    cached = candidate.cached_hashes
    count = 0
    for block_hash in prompt_hashes:
        if block_hash not in cached:
            break
        count += 1
    return count
