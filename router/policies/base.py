"""What a policy sees of a node, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar


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


def num_cached_blocks(candidate: Candidate, prompt_hashes: Sequence[bytes]) -> int:
    """Blocks of the prompt's beginning that the node is expected to have."""
    cached = candidate.cached_hashes
    count = 0
    for block_hash in prompt_hashes:
        if block_hash not in cached:
            break
        count += 1
    return count
