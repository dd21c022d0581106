"""What the limits of a key allow, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from baton.router.http.access.account import CONCURRENT, REQUESTS, TOKENS, Account, duration_text
from baton.router.http.access.keys import ApiKey
from baton.wire.errors import InvalidRequest, RateLimited


class Clock:
    """Seconds that pass when the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _account(clock: Clock, **limits: Any) -> Account:
    return Account(_key(**limits), clock)


def _key(**limits: Any) -> ApiKey:
    return ApiKey("0" * 64, **limits)


def _refused(account: Account) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        account.begin()
    return caught.value


def test_requests_come_back_evenly_over_a_minute(clock: Clock) -> None:
    account = _account(clock, requests_per_minute=6)
    for _ in range(6):
        account.begin()
    error = _refused(account)
    assert (error.limit, error.retry_after_s) == (REQUESTS, 10)
    clock.now_s += 9.9
    assert _refused(account).retry_after_s == 1
    clock.now_s += 0.1
    account.begin()
    clock.now_s += 3600
    for _ in range(6):
        account.begin()
    _refused(account)


def test_a_refused_request_uses_nothing(clock: Clock) -> None:
    account = _account(clock, requests_per_minute=5, max_concurrent_requests=1)
    account.begin()
    for _ in range(20):
        assert _refused(account).limit == CONCURRENT
    account.end()
    account.begin()
    assert (account.num_requests, account.num_running) == (2, 1)
    assert account.headers()["x-ratelimit-remaining-requests"] == "3"


def test_tokens_are_charged_before_and_corrected_after(clock: Clock) -> None:
    account = _account(clock, tokens_per_minute=600)
    account.charge(500)
    with pytest.raises(RateLimited) as caught:
        account.charge(200)
    assert (caught.value.limit, caught.value.retry_after_s) == (TOKENS, 10)
    account.settle(500, num_prompt_tokens=20, num_generated_tokens=30)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "550"
    account.charge(550)


def test_what_was_used_beyond_the_charge_is_a_debt(clock: Clock) -> None:
    account = _account(clock, tokens_per_minute=600)
    account.charge(10)
    account.settle(10, num_prompt_tokens=5, num_generated_tokens=1195)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(RateLimited) as caught:
        account.charge(10)
    assert caught.value.retry_after_s == 61
    clock.now_s += 61
    account.charge(10)


def test_more_tokens_than_the_limit_can_never_be_served(clock: Clock) -> None:
    with pytest.raises(InvalidRequest, match="never"):
        _account(clock, tokens_per_minute=600).charge(601)


def test_the_headers_of_a_key_name_its_limits_only(clock: Clock) -> None:
    assert _account(clock).headers() == {}
    assert _account(clock, max_concurrent_requests=1).headers() == {}
    account = _account(clock, requests_per_minute=60, tokens_per_minute=6000)
    account.begin()
    account.charge(5900)
    assert account.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "59s",
    }


def test_other_limits_keep_what_was_used(clock: Clock) -> None:
    account = _account(clock, requests_per_minute=10)
    for _ in range(8):
        account.begin()
    account.change_limits(_key(requests_per_minute=9))
    account.begin()
    _refused(account)
    account.change_limits(_key())
    account.begin()
    assert account.headers() == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (59.5, "59.5s"), (60, "1m0s"), (360.04, "6m0.1s"), (3630, "1h0m30s")],
)
def test_durations_are_written_as_clients_know_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
