"""Drafts from text: which texts a request has, and that a step never waits for the reading of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from baton.engine.scheduler.proposer import Draft, Wanted
from baton.engine.scheduler.request import PENDING_TOKEN, Request
from baton.engine.speculation.text import proposer as module
from baton.engine.speculation.text.proposer import Sources, TextProposer
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.native.compiled import needs_kernels
from tests.engine.speculation.text_proposers import proposer_of

pytestmark = needs_kernels
NUMBERS = count(1)


def text_proposer(**config: Any) -> TextProposer:
    found = proposer_of(json.dumps({"method": "suffix", "suffix_decoding_max_spec_factor": 9.0, **config}))
    assert isinstance(found, TextProposer)
    return found


def request_of(
    prompt_ids: Sequence[int], output_ids: Sequence[int] = (), root: bytes = b"", prediction: Sequence[int] = ()
) -> Request:
    params = DecodingParams(prediction_ids=tuple(prediction))
    return Request(RequestKey.numbered(next(NUMBERS)), Prompt.of(prompt_ids), params, root, 10**6, tuple(output_ids))


def draft_of(proposer: TextProposer, request: Request, max_tokens: int = 5) -> Draft:
    (found,) = proposer.propose([Wanted(request, max_tokens)])
    assert bool(found.token_ids) <= proposer.follows(request)
    assert len(found.confidences) >= len(found.token_ids)
    assert all(0.0 <= confidence <= 1.0 for confidence in found.confidences)
    return found


def said(proposer: TextProposer, request: Request, token_ids: Sequence[int]) -> None:
    """The request says these, token by token."""
    for token_id in token_ids:
        request.token_ids.append(token_id)
        proposer.follows(request)


def test_what_a_request_has_read_and_said_comes_again() -> None:
    proposer, request = text_proposer(), request_of(range(100, 120))
    assert not proposer.follows(request)
    said(proposer, request, [7, 104, 105])
    draft = draft_of(proposer, request)
    assert (draft.token_ids, draft.method) == ([106, 107, 108, 109, 110], "suffix")
    said(proposer, request, [8, 7, 104])
    assert draft_of(proposer, request).token_ids == [105, 8, 7, 104, 105]


def test_a_token_that_is_not_known_yet_is_not_read() -> None:
    proposer, request = text_proposer(), request_of(range(20), [3, 4])
    request.token_ids.append(PENDING_TOKEN)
    request.num_pending_tokens = 1
    assert proposer.follows(request)
    request.token_ids[-1], request.num_pending_tokens = 5, 0
    assert draft_of(proposer, request).token_ids == [6, 7, 8, 9, 10]


def test_what_one_request_of_a_tenant_says_comes_again_in_another() -> None:
    proposer, first, second = text_proposer(), request_of([1, 2], root=b"a"), request_of([1, 2, 3], root=b"a")
    proposer.follows(second)
    said(proposer, first, range(50, 60))
    said(proposer, second, range(50, 53))  # while the first goes on
    assert draft_of(proposer, second).token_ids == [53, 54, 55, 56, 57]
    proposer.forget(first)
    assert draft_of(proposer, second).token_ids == [53, 54, 55, 56, 57]
    later = request_of([9], range(54, 57), root=b"a")
    assert draft_of(proposer, later).token_ids == [57, 58, 59]


def test_nobody_has_a_draft_from_the_text_of_another_tenant() -> None:
    proposer, tenants = text_proposer(), [request_of([*range(9)], root=bytes([number])) for number in range(5)]
    for number, request in enumerate(tenants):
        said(proposer, request, range(50, 60))
        proposer.forget(request)
        other = request_of([9], range(50, 53), root=b"other %d" % number)
        assert not proposer.follows(other)
        assert not draft_of(proposer, other).token_ids


def test_prompts_are_nothing_that_other_requests_see_but_for_their_ends() -> None:
    proposer, first = text_proposer(), request_of(range(100, 200))
    said(proposer, first, [7, 8, 9])
    assert not draft_of(proposer, request_of([1, 100, 101, 102, 103])).token_ids
    assert draft_of(proposer, request_of([1, *range(190, 200)])).token_ids == [7, 8, 9]


def test_outputs_of_others_can_be_left_out() -> None:
    proposer, first = text_proposer(suffix_decoding_max_cached_requests=0), request_of([1, 2])
    said(proposer, first, range(50, 60))
    assert not proposer.follows(request_of([9], range(50, 53)))


def test_a_prediction_is_followed_and_goes_on_where_the_text_does_not() -> None:
    proposer = text_proposer()
    request = request_of([1, 2, 3], prediction=range(30, 60))
    assert draft_of(proposer, request).token_ids == (30, 31, 32, 33, 34)
    said(proposer, request, [30, 31, 99])
    assert not proposer.follows(request)
    said(proposer, request, [33, 34])
    draft = draft_of(proposer, request)
    assert (draft.token_ids, draft.method) == ((35, 36, 37, 38, 39), "prediction")


def test_of_several_drafts_the_one_of_which_most_should_be_right_is_taken() -> None:
    """Here the own text has said something else, for far longer."""
    proposer = text_proposer()
    own = [*range(100, 130), *range(70, 80)]
    request = request_of([*own, 1, 2], prediction=[129, 60, 61])
    said(proposer, request, range(100, 130))
    assert draft_of(proposer, request).method == "suffix"
    assert draft_of(proposer, request).token_ids == [70, 71, 72, 73, 74]


def test_drafts_keep_to_the_settings() -> None:
    request = request_of([*range(40), 1, 2, 3, 4])
    lengths: list[tuple[dict[str, float], int]] = [
        ({}, 16),
        ({"num_speculative_tokens": 3}, 3),
        ({"suffix_decoding_max_spec_factor": 1.5}, 6),
        ({"suffix_decoding_max_spec_factor": 0.0}, 0),
        ({"suffix_decoding_max_tree_depth": 2}, 2),
    ]
    for settings, length in lengths:
        proposer = text_proposer(**{"num_speculative_tokens": 16, **settings})
        assert len(draft_of(proposer, request, 99).token_ids) == length, settings
        proposer.forget(request)
    text = [*[1, 2, 3] * 3, *[1, 2, 4], 1, 2]
    counts = [
        len(draft_of(text_proposer(suffix_decoding_min_token_prob=least), request_of(text), 1).token_ids)
        for least in (0.0, 0.74, 0.76)
    ]
    assert counts == [1, 1, 0]


def test_a_short_match_that_says_little_is_not_worth_waiting_for() -> None:
    proposer = text_proposer()
    assert not proposer.follows(request_of([1, 2, 1, 3, 1, 4, 1, 5, 1]))
    assert proposer.follows(request_of([1, 2, 1, 2, 1, 2, 1, 2, 1]))
    assert proposer.follows(request_of([9, 8, 7, 6, 1, 9, 8, 7, 6, 2, 9, 8, 7, 6, 3, 9, 8, 7, 6]))


class _Reader:
    """Counts what it reads."""

    has_draft = False

    def __init__(self) -> None:
        self.slices: list[int] = []

    def read(self, token_ids: Sequence[int]) -> None:
        self.slices.append(len(token_ids))

    def read_one(self, token_id: int) -> None:
        self.slices.append(1)

    def draft(self, max_tokens: int) -> Draft:
        raise AssertionError


@pytest.fixture
def counting() -> tuple[TextProposer, list[_Reader]]:
    readers: list[_Reader] = []

    def own(request: Request) -> _Reader:
        readers.append(_Reader())
        return readers[-1]

    return TextProposer(9, Sources(own), "suffix"), readers


def test_long_prompts_are_read_in_slices_by_one_request_at_a_time(
    counting: tuple[TextProposer, list[_Reader]],
) -> None:
    proposer, readers = counting
    requests = [request_of(range(5000)), request_of(range(5000)), request_of(range(30))]
    for _ in range(9):
        before = sum(sum(reader.slices) for reader in readers)
        for request in requests:
            proposer.follows(request)
        assert sum(sum(reader.slices) for reader in readers) - before <= 2 * module._SLICE + 30
    assert [sum(reader.slices) for reader in readers] == [5000, 5000, 30]
    assert max(readers[0].slices) == module._SLICE


def test_the_others_go_on_when_a_request_has_left_in_the_middle_of_its_prompt(
    counting: tuple[TextProposer, list[_Reader]],
) -> None:
    proposer, readers = counting
    first, second = request_of(range(50000)), request_of(range(3000))
    for _ in range(5):
        proposer.follows(first)
        proposer.follows(second)
    assert not sum(readers[1].slices)
    proposer.forget(first)
    for _ in range(5):
        proposer.follows(second)
    assert sum(readers[1].slices) == 3000


def test_the_texts_of_all_requests_together_have_a_bound(
    counting: tuple[TextProposer, list[_Reader]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer, readers = counting
    monkeypatch.setattr(module, "MAX_TOKENS", 100)
    requests = [request_of(range(40)) for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        for request in requests:
            assert not proposer.follows(request)
            assert not draft_of(proposer, request).token_ids
    assert len(readers) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "drafts are not taken from the text of each request: prompts have over 100 tokens"
    ]
    proposer.forget(requests[0])
    proposer.follows(request_of(range(40)))
    assert len(readers) == 3


def test_a_prediction_is_there_without_room_for_the_text(
    counting: tuple[TextProposer, list[_Reader]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 0)
    assert draft_of(counting[0], request_of([1], prediction=[5, 6])).token_ids == (5, 6)
