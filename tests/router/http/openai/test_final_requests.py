"""How much an answer may hold that is not streamed."""

from __future__ import annotations

import pytest

from baton.router.http.openai.final_requests import MAX_HELD_LOGPROBS, MAX_HELD_TOKENS, bounded
from baton.wire.errors import InvalidRequest
from baton.wire.sampling import DecodingParams

ROOM = 2**24


@pytest.mark.parametrize(("logprobs", "num_choices", "most"), [
    (None, 1, MAX_HELD_TOKENS),
    (None, 128, MAX_HELD_TOKENS // 128),
    (0, 1, MAX_HELD_LOGPROBS),
    (20, 16, MAX_HELD_LOGPROBS // (16 * 21)),
])  # fmt: skip
def test_what_is_asked_for_is_allowed_up_to_the_limit_and_no_further(
    logprobs: int | None, num_choices: int, most: int
) -> None:
    good = DecodingParams(max_tokens=most, logprobs=logprobs)
    assert bounded(good, num_choices, ROOM, "max_tokens") == good
    with pytest.raises(InvalidRequest) as raised:
        bounded(DecodingParams(max_tokens=most + 1, logprobs=logprobs), num_choices, ROOM, "max_completion_tokens")
    assert raised.value.param == "max_completion_tokens"
    limit = MAX_HELD_TOKENS if logprobs is None else MAX_HELD_LOGPROBS
    assert str(limit) in raised.value.message


def test_a_request_without_max_tokens_ends_at_the_limit_instead() -> None:
    params = DecodingParams(logprobs=20)
    assert bounded(params, 2, 100, "max_tokens") == params
    assert bounded(params, 2, ROOM, "max_tokens").max_tokens == MAX_HELD_LOGPROBS // 42
