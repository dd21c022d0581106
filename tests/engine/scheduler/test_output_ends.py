"""What ends a request, and when a jump over forced tokens does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from baton.engine.scheduler import output_ends
from baton.engine.scheduler.output_ends import OutputEnds
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step import RequestOutput, SampledToken, SampledTokens
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.test_matchers import GRAMMAR, FakeMatcher
from tests.request_keys import A

EOS, SAMPLED = 60, (SampledToken(7, None),)


def request(*output: int, num_pending: int = 0, matcher: FakeMatcher | None = None, **members: Any) -> Request:
    """A prompt of five tokens and what came behind it."""
    params = DecodingParams(grammar=None if matcher is None else GRAMMAR, **{"max_tokens": 5, **members})
    return Request(A, Prompt((EOS,) * 5), params, b"", 64, output, num_pending_tokens=num_pending, matcher=matcher)


def ends(clock: Iterator[float] | None = None, *, jumps_ahead: bool = True) -> OutputEnds:
    ticks = clock or iter(lambda: 0.0, 1.0)
    return OutputEnds(frozenset({EOS}), jumps_ahead=jumps_ahead, clock=lambda: next(ticks))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(7), ""),
        (request(7, 8, 9, 10), ""),
        (request(7, 8, 9, 10, 11), "length"),
        (request(7, EOS), "stop"),
        (request(7, EOS, ignore_eos=True), ""),
        (request(7, 8, stop_token_ids=(8, 9)), "stop"),
        (request(7, 8, stop_token_ids=(8, 9), ignore_eos=True), "stop"),
        (request(7, EOS, min_tokens=2), "stop"),
        (request(7, EOS, min_tokens=3), ""),
        (request(7, 8, 9, 10, EOS, min_tokens=5), "stop"),
        (request(EOS, -1, num_pending=1), "stop"),
        (request(7, 8, 9, 10, -1, num_pending=1), ""),
        (request(7, matcher=FakeMatcher(length=1)), "complete"),
        (request(7, matcher=FakeMatcher(length=2)), ""),
        (request(7, EOS, matcher=FakeMatcher(length=1)), "stop"),
        (request(7, 8, 9, 10, 11, matcher=FakeMatcher(length=1)), "complete"),
    ],
)
def test_the_last_known_token_ends_a_request_or_not(asked: Request, reason: str) -> None:
    assert ends().finish_reason(asked) == reason


def jumped(
    forced: list[int], made: OutputEnds, *, sampled: SampledTokens = SAMPLED, has_left: bool = False
) -> list[int]:
    """The tokens that are forced behind a first one."""
    matcher = FakeMatcher(length=99)
    matcher.forced = forced
    asked = request(7, matcher=matcher, max_tokens=50)
    output = made.jump(asked, RequestOutput(A, 1, 5, 0, 0, sampled, "", has_left, has_failed=False))
    forced = output.token_ids[len(sampled) :]
    assert asked.token_ids[6:] == forced
    assert output.num_forced == len(forced)
    return forced


def test_a_jump_ends_as_soon_as_it_has_taken_longer_than_it_may() -> None:
    longest_s = output_ends.MAX_JUMP_S
    quarters = (each * longest_s / 4 for each in count())
    assert jumped([8] * 9, ends(quarters)) == [8] * 5
    assert jumped([8] * 9, ends(iter([0.0, longest_s, 2 * longest_s]))) == [8, 8]


def test_nobody_jumps_who_has_no_token_has_left_or_may_not() -> None:
    assert jumped([8], ends()) == [8]
    assert jumped([], ends()) == []
    assert jumped([8], ends(), sampled=()) == []
    assert jumped([8], ends(), has_left=True) == []
    assert jumped([8], ends(jumps_ahead=False)) == []
