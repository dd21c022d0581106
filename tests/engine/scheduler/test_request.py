"""What a request says of itself, and its share of a step."""

from __future__ import annotations

import pytest

from baton.engine.scheduler.request import MAX_FORCED, Request, Step, as_known
from baton.wire.images import PromptImage
from baton.wire.sampling import DecodingParams
from tests.request_keys import A


def request(num_tokens: int, num_computed_tokens: int = 0, num_prompt_tokens: int = 10) -> Request:
    tokens = list(range(num_tokens))
    return Request(A, tokens, num_prompt_tokens, DecodingParams(), b"", 999, num_computed_tokens=num_computed_tokens)


@pytest.mark.parametrize(("start", "computes"), [(0, True), (3, True), (4, True), (5, False), (8, False), (9, False)])
def test_a_share_computes_an_image_if_a_token_of_it_is_in_it(start: int, computes: bool) -> None:
    share = request(20, start).share(4)  # tokens start .. start + 3
    for image in (PromptImage(3, 2, 28, 28, b"i" * 16), PromptImage(12, 2, 28, 28, b"i" * 16)):
        share = share._replace(images=(image,))
        is_within = start <= image.stop - 1 and image.start <= start + 3
        assert share.computes_images is is_within
    assert share._replace(images=(PromptImage(3, 2, 28, 28, b"i" * 16),)).computes_images is computes


def test_forced_tokens_are_told_from_a_prompt_by_where_they_stand_and_how_many_they_are() -> None:
    assert request(10 + 1 + MAX_FORCED, 10).has_jumped
    assert not request(10 + 2 + MAX_FORCED, 10).has_jumped
    assert not request(12, 9).has_jumped


def test_a_step_that_is_planned_later_has_the_tokens_of_now() -> None:
    live = request(4)
    (share,) = as_known(Step((live.share(4),))).shares
    live.token_ids += [77, 78]
    tokens = share.token_ids
    assert (len(tokens), list(tokens), tokens[-1], tokens[0]) == (4, [0, 1, 2, 3], 3, 0)
    assert (list(tokens[1:]), list(tokens[-2:9])) == ([1, 2, 3], [2, 3])
    with pytest.raises(IndexError):
        tokens[4]
