"""What a request says of itself, and its share of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.engine.cache.block_pool import pack_blocks
from baton.engine.runner.prompt_scoring import PromptScoring
from baton.engine.scheduler.request import MAX_FORCED, BlockCopy, Fork, Request, choices_of
from baton.engine.scheduler.step import Step, as_known
from baton.wire.images import PromptImage, digest_of
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.test_matchers import FakeMatcher
from tests.request_keys import A, B, C

PARAMS = DecodingParams(max_tokens=3)


def request(num_tokens: int, num_computed_tokens: int = 0, *images: PromptImage, **members: Any) -> Request:
    """The prompt has ten of the tokens, or all where there are fewer."""
    tokens = range(num_tokens)
    values: dict[str, Any] = {"params": DecodingParams(), "hash_root": b"", "max_total_tokens": 999, **members}
    prompt = Prompt.of(tokens[:10], media=images)
    return Request(A, prompt, output_ids=tokens[10:], num_computed_tokens=num_computed_tokens, **values)


@pytest.mark.parametrize(("start", "computes"), [(0, True), (3, True), (4, True), (5, False), (8, False), (9, False)])
def test_a_share_computes_an_image_if_a_token_of_it_is_in_it(start: int, computes: bool) -> None:
    near, far = PromptImage(3, 2, b"i" * 16, b"", 28, 28), PromptImage(12, 2, b"i" * 16, b"", 28, 28)
    for image in (near, far):
        is_within = start <= image.stop - 1 and image.start <= start + 3
        assert request(20, start, image).share(4).computes_media is is_within  # tokens start .. start + 3
    assert request(20, start, near).share(4).computes_media is computes


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


IMAGE = PromptImage(3, 4, b"i" * 16, b"", 28, 28)


def test_a_share_has_all_that_a_runner_needs_and_tells_whether_it_reaches_the_last_token() -> None:
    asked = request(20, 8, IMAGE)
    asked.arrival, asked.block_table, asked.matcher = 7, pack_blocks((5, 6)), FakeMatcher()
    asked.forks, asked.hash_root, asked.block_copy = (Fork(B, PARAMS),), b"root", BlockCopy(3, 6)
    share = asked.share(12)
    assert (share.key, share.start, share.num_tokens, share.context_len) == (A, 8, 12, 20)
    assert share.prompt is asked.prompt
    assert (share.token_ids, share.block_table, share.params) == (asked.token_ids, asked.block_table, asked.params)
    assert (share.needs_sample, asked.share(11).needs_sample) == (True, False)
    assert (share.arrival, share.forks, share.matcher) == (7, asked.forks, asked.matcher)
    assert (share.takes_largest, share.hash_root, share.block_copy) == (False, b"root", BlockCopy(3, 6))
    asked.num_steps_in_flight = 1
    assert asked.share(12).block_copy is None, "the step in flight makes it"


def test_a_step_of_a_series_has_shares_so_many_tokens_further() -> None:
    shares = (request(20, 8).share(1), request(20, 15).share(3))
    assert Step(shares).requests is shares
    assert (Step(shares, number=2).requests, Step(shares).num_tokens) == (
        (shares[0]._replace(start=10), shares[1]._replace(start=17)),
        4,
    )
    assert (Step(shares).spans, Step(shares).series, Step(shares).context) == ((), None, 0)


def test_prompt_and_output_have_as_many_tokens_as_both_limits_allow() -> None:
    for max_tokens, most_tokens in ((None, 99), (5, 15), (89, 99), (90, 99)):
        asked = request(12, params=DecodingParams(max_tokens=max_tokens), max_total_tokens=99)
        assert asked.most_tokens == most_tokens
    assert request(12, params=DecodingParams(temperature=0.0)).takes_largest


def test_pending_tokens_are_not_known() -> None:
    asked = request(12)
    asked.num_pending_tokens = 2
    assert (asked.num_known_tokens, asked.num_uncomputed_tokens) == (10, 12)


@pytest.mark.parametrize(
    ("members", "awaits"),
    [({}, False), ({"first_token_only": True}, True), ({"is_wanted": False}, True), ({"max_total_tokens": 12}, True)],
)
def test_a_request_awaits_its_last_token_only_while_one_is_pending(members: dict[str, Any], awaits: bool) -> None:
    asked = request(12, **members)
    assert not asked.awaits_last_token
    asked.num_pending_tokens = 1
    assert asked.awaits_last_token is awaits


def test_what_tells_log_probabilities_is_not_reused_until_it_has_told_them() -> None:
    assert request(12).num_reusable_tokens == 11
    for first_unread, reusable in ((0, 0), (8, 8), (9, 11)):
        asked = request(12, reading=PromptScoring(0))
        assert asked.unread_rows == range(9)
        asked.unread_rows = range(first_unread, 9)
        assert asked.num_reusable_tokens == reusable


def test_pixels_are_lacked_until_their_image_is_computed() -> None:
    asked = request(12, 0, IMAGE)
    for num_computed, lacks in ((0, True), (6, True), (7, False)):
        asked.num_computed_tokens = num_computed
        assert asked.lacks_payload is lacks
    pixels = bytes(3 * 28 * 28)
    assert not request(12, 0, PromptImage(3, 4, digest_of(28, 28, pixels), pixels, 28, 28)).lacks_payload


def test_a_request_is_ready_when_its_grammar_is() -> None:
    for matcher, is_ready in ((None, True), (FakeMatcher(), True), (FakeMatcher(is_ready=False), False)):
        assert request(3, matcher=matcher).is_ready is is_ready


def test_a_fork_goes_on_with_the_prompt_and_its_own_tokens() -> None:
    asked = request(11, 0, IMAGE, matcher=FakeMatcher(), hash_root=b"root")
    asked.token_ids += [90, 91]
    forked = asked.forked(Fork(B, PARAMS), 11, 78)
    assert (forked.key, forked.params, forked.token_ids) == (B, PARAMS, [*range(11), 78])
    assert (forked.hash_root, forked.max_total_tokens) == (b"root", 999)
    assert forked.prompt is asked.prompt
    assert (forked.num_cached_tokens, forked.forks, forked.is_wanted, forked.first_token_only) == (0, (), True, False)
    assert isinstance(forked.matcher, FakeMatcher)
    assert forked.matcher.output == [10], "the last one is still to be taken"
    assert request(10).forked(Fork(B, PARAMS), 10, 1).matcher is None


def test_choices_are_numbered_and_only_the_first_reports_the_prompt() -> None:
    params = DecodingParams(choice=3, prompt_logprobs=2)
    own, *others = choices_of([A, B, C], params)
    assert own == Fork(A, params)
    assert [(each.key, each.params.choice, each.params.prompt_logprobs) for each in others] == [
        (B, 4, None),
        (C, 5, None),
    ]


def test_a_new_request_has_nothing_yet() -> None:
    asked = request(3)
    assert (asked.num_cached_tokens, asked.last_due_s, asked.first_due_s) == (None, None, math.inf)
    assert (asked.first_token_only, asked.is_wanted, asked.block_copy) == (False, True, None)
    counts = (
        asked.num_pending_tokens,
        asked.num_steps_in_flight,
        asked.num_published_blocks,
        asked.num_computed_tokens,
    )
    assert counts == (0, 0, 0, 0)
    asked.block_table, asked.block_copy = pack_blocks((5, 6)), BlockCopy(3, 6)
    assert list(asked.held_blocks) == [3, 5, 6]
