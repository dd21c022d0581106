"""What became of one request, as its client saw it. All times are `time.monotonic()` seconds.

Owns the record that the client writes and that metrics, breakdown and plots read. Knows neither sockets nor statistics.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class Failure(enum.StrEnum):
    """Why a request is not averaged in.

    A connection is lost before an answer began and truncates one that did. An endpoint whose name is unknown or that
    cannot be reached is one that refused.
    """

    REFUSED_CONNECTION = "connection refused"
    LOST_CONNECTION = "connection lost"
    HTTP_ERROR = "http error"
    ERROR_EVENT = "error event in the stream"
    TRUNCATED = "stream ended without [DONE]"
    STALLED = "no answer in time"
    BAD_STREAM = "answer that cannot be read"
    NO_TOKENS = "answer without tokens"
    WRONG_USAGE = "usage differs from what was sent or received"


@dataclass(slots=True)
class Outcome:
    """One request. Complete when `failure` is None; then `chunk_s` has at least one entry.

    `index` says which prompt it is. `scheduled_s` is when it should have been sent, `sent_s` when it was.
    `chunk_s[i]` is when the i-th event with choices arrived; `chunk_tokens[i]` is 1, or 0 where the event only opens an
    answer (the role of a chat). `closed_s` is when the whole answer was over, or when it failed.
    `num_prompt_tokens` is what was sent, as far as known; `num_output_tokens` what came: as the server counted, else
    the sum of `chunk_tokens`. `usage` is what the server reported (its last `usage` object), {} when it did not.
    `timings` is Baton's own (`usage.timings`), {} elsewhere.
    """

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    closed_s: float = 0.0

    @property
    def timings(self) -> dict[str, Any]:
        """Baton's stamps of this request, or {}."""
        found = self.usage.get("timings")
        return found if isinstance(found, dict) else {}

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the server had already computed; None when it does not say."""
        details = self.usage.get("prompt_tokens_details")
        return count_of(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def drafts(self) -> dict[str, dict[str, Any]]:
        """Baton's counts of drafts by method, or {}."""
        details = self.usage.get("completion_tokens_details")
        found = details.get("drafts") if isinstance(details, dict) else None
        return found if isinstance(found, dict) else {}


def count_of(value: Any) -> int | None:
    """A number of tokens as a server reports it; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
