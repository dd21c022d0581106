"""The measurements of requests: what is counted of all of them, and what is told of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.router.requests.timings import RelayTimes
from baton.router.routing.pulls import PulledPrefix
from baton.wire.drafts import PREDICTION, VerifiedDraft
from baton.wire.messages.output import HandoffFigures


@dataclass(slots=True)
class RelayCounters:
    """Counts of what happened to requests. The metrics report them."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_retries: int = 0
    num_handoff_attempts: int = 0
    num_decode_only_attempts: int = 0
    num_kept_prompts: int = 0
    num_pauses: int = 0
    num_moves: int = 0


@dataclass(frozen=True, slots=True)
class FlightFigures:
    """The measurements of one request: `num_cached_tokens` of its prompt were cached where it was computed,
    `num_attempts` counts from 1, `cached_by_role` and `cached_by_place` are as in `CachedTokens`. `pulled`: what was
    copied there from another node first."""

    num_cached_tokens: int
    handoff: HandoffFigures | None
    times: RelayTimes
    num_attempts: int
    cached_by_role: Mapping[str, int]
    cached_by_place: Mapping[str, int]
    pulled: PulledPrefix | None = None


@dataclass(slots=True)
class DraftedTokens:
    """Tokens that were drafted for an answer and verified, by method, and those of them that are in the answer.
    `steps`: those that have verified them."""

    steps: Counter[str] = field(default_factory=Counter)
    verified: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, draft: VerifiedDraft, num_found: int) -> None:
        """A step with `draft` has found so many tokens: fewer than were right where the answer ended among them."""
        self.steps[draft.method] += 1
        self.verified[draft.method] += draft.num_tokens
        self.accepted[draft.method] += min(draft.num_accepted, num_found)

    def add_all(self, other: DraftedTokens) -> None:
        """Those of another answer."""
        self.steps += other.steps
        self.verified += other.verified
        self.accepted += other.accepted

    @property
    def of_prediction(self) -> tuple[int, int]:
        """Tokens of the request's own prediction: those in the answer, and those that were tried in vain."""
        accepted = self.accepted[PREDICTION]
        return accepted, self.verified[PREDICTION] - accepted
