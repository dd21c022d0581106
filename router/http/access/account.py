"""What one API key has used, and what its limits leave of it.

Owns the counts of a key: requests and tokens in token buckets, requests at once, and totals for the metrics. A bucket
holds what may be used at once and is filled evenly, by its whole content in a minute. Does not know HTTP but for the
names and formats of OpenAI's `x-ratelimit-*` headers.

Tokens are charged before a request runs, by prompt and `max_tokens`, and corrected when it has ended. One that used
more than it was charged leaves a debt: the bucket is below zero and the key waits until it is filled again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from baton.router.http.access.keys import ApiKey
from baton.wire.errors import InvalidRequest, RateLimited

_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
_CONCURRENCY_RETRY_S = 1
REQUESTS, TOKENS, CONCURRENT = "requests_per_minute", "tokens_per_minute", "max_concurrent_requests"


class TokenBucket:
    """Holds up to `per_minute` and gains as much in a minute. Times are seconds of any clock that never goes back."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """The tokens that are left; below zero after more was taken than there was."""
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S)
        self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is there, 0 when it is."""
        missing_s = (amount - self.level(now_s)) * _MINUTE_S / self.per_minute
        return missing_s if missing_s > _ROUNDING_S else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`, whether it is there or not; a negative amount is given back."""
        self._level = min(self.per_minute, self.level(now_s) - amount)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the limit; what has been used stays used."""
        used = self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self._level = per_minute - used


class Account:
    """What one API key has used and may still use. Keeps its counts when the key file is read again."""

    def __init__(self, limits: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_running = 0
        self._clock = clock
        self._limits = limits
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change_limits(limits)

    def change_limits(self, limits: ApiKey) -> None:
        """Apply other limits from now on."""
        now_s = self._clock()
        self._limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now_s)

    def begin(self) -> None:
        """Count one request, which has to `end`. Raises `RateLimited`; such a request is not counted."""
        now_s = self._clock()
        limit = self._limits.max_concurrent_requests
        if limit is not None and self.num_running >= limit:
            message = f"this API key may have {limit} requests at once"
            raise RateLimited(message, CONCURRENT, _CONCURRENCY_RETRY_S)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now_s)
            if wait_s:
                message = f"this API key may send {self._requests.per_minute} requests per minute"
                raise RateLimited(message, REQUESTS, math.ceil(wait_s))
            self._requests.take(1, now_s)
        self.num_running += 1
        self.num_requests += 1

    def end(self) -> None:
        """Note that a request has ended."""
        self.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Take the tokens that a request may need. Raises `RateLimited`, or `InvalidRequest` when the limit could never
        allow so many."""
        if self._tokens is None:
            return
        now_s, limit = self._clock(), self._tokens.per_minute
        if num_tokens > limit:
            raise InvalidRequest(
                f"this request may need {num_tokens} tokens, but this API key may use {limit} per minute: it can never "
                "be served",
                code="request_too_large",
            )
        wait_s = self._tokens.wait_s(num_tokens, now_s)
        if wait_s:
            message = f"this API key may use {limit} tokens per minute"
            raise RateLimited(message, TOKENS, math.ceil(wait_s))
        self._tokens.take(num_tokens, now_s)

    def settle(self, num_charged: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Correct what was charged to what a request has used."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_generated_tokens += num_generated_tokens
        if self._tokens is not None:
            self._tokens.take(num_prompt_tokens + num_generated_tokens - num_charged, self._clock())

    def headers(self) -> dict[str, str]:
        """The `x-ratelimit-*` headers of those limits that the key has."""
        now_s = self._clock()
        found: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now_s))))
                found[f"x-ratelimit-reset-{kind}"] = duration_text(bucket.wait_s(bucket.per_minute, now_s))
        return found


def duration_text(seconds: float) -> str:
    """A duration as OpenAI writes it: "120ms", "59.5s", "6m0s", "1h0m30s"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    minutes, rest = divmod(tenths, 600)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if hours or minutes else "", f"{rest / 10:g}s"]
    return "".join(parts)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket
