"""What is refused before it waits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.engine.scheduler.limits import SchedulerLimits, require_room_for_media
from baton.engine.scheduler.request import Fork, Request
from baton.wire.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded
from baton.wire.media import Medium
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.request_keys import A, key_of

LIMITS = SchedulerLimits(4, max_num_seqs=3, max_num_batched_tokens=16, max_request_tokens=10, vocab_size=50)


def request(token_ids: list[int], num_forks: int = 0, **members: Any) -> Request:
    params = DecodingParams(**members)
    forks = tuple(Fork(key_of(number), params) for number in range(num_forks))
    return Request(A, Prompt.of(token_ids), params, b"", 64, forks=forks)


def test_what_just_fits_is_taken() -> None:
    LIMITS.check(request([49] * 9, num_forks=2, stop_token_ids=frozenset({49})))
    LIMITS.check(request([0]))


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (request([]), InvalidRequest, "at least one token"),
        (request([1] * 10), ContextLengthExceeded, "10 tokens leave no room for output: at most 10 tokens"),
        (request([1], num_forks=3), InvalidRequest, "4 choices, a step has 3 at most"),
        (request([1, 50, 2]), InvalidRequest, "token id 50 is outside the vocabulary"),
        (request([1], stop_token_ids=frozenset({50})), InvalidRequest, "stop_token_ids: token id 50"),
    ],
)
def test_what_is_just_too_much_is_refused(refused: Request, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LIMITS.check(refused)


def test_a_prompt_of_an_adapter_that_is_not_here_is_refused_by_its_digest() -> None:
    limits = replace(LIMITS, adapters=frozenset({b"a" * 16}))
    for adapter in (b"", b"a" * 16):
        limits.check_adapter(Prompt((1,), adapter=adapter))
    unknown = Request(A, Prompt((1,), adapter=b"b" * 16), DecodingParams(), b"", 64)
    with pytest.raises(ModelNotFound, match=f"the adapter {'62' * 16} is not loaded here"):
        limits.check(unknown)


def holding(num_bytes: int) -> Request:
    """A request with two media of so many bytes together."""
    media = [cast("Medium", SimpleNamespace(payload=range(count))) for count in (num_bytes - 7, 7)]
    return Request(A, Prompt.of([1], media=media), DecodingParams(), b"", 64)


def test_media_are_taken_until_those_that_are_there_have_half_a_gibibyte() -> None:
    require_room_for_media([holding(2**28), request([1]), holding(2**28)])
    with pytest.raises(Overloaded, match="leave no room for more"):
        require_room_for_media([holding(2**28), request([1]), holding(2**28 + 1)])
