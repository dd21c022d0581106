"""The measurements of requests: what is counted of all of them, and what is told of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.router.requests.timings import RelayTimes
from baton.router.routing.pulls import PulledPrefix
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
