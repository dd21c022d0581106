"""How often drafts are right: learned by confidence, and by request against that."""

from __future__ import annotations

import pytest

from baton.engine.scheduler.acceptance import Acceptance, RequestAcceptance
from baton.engine.scheduler.proposer import Draft


def draft(count: int, confidence: float = 0.5, method: str = "ngram") -> Draft:
    return Draft(range(count), [confidence] * count, method)


def test_a_confidence_is_believed_until_drafts_have_shown_more() -> None:
    acceptance, others = Acceptance(), RequestAcceptance()
    assert acceptance.chances(draft(3), RequestAcceptance()) == [0.5, 0.25, 0.125]
    for _ in range(200):
        acceptance.verified(draft(1), 1, RequestAcceptance())
        acceptance.verified(draft(1, 0.1), 0, RequestAcceptance())
    assert acceptance.chances(draft(1), others)[0] > 0.9
    assert acceptance.chances(draft(1, 0.1), others)[0] < 0.05
    assert acceptance.chances(draft(1, method="suffix"), others) == [0.5]


def test_tokens_behind_the_first_wrong_one_tell_nothing() -> None:
    short, long = Acceptance(), Acceptance()
    for _ in range(50):
        short.verified(draft(3), 2, RequestAcceptance())
        long.verified(draft(9), 2, RequestAcceptance())
    assert short.chances(draft(1), RequestAcceptance()) == long.chances(draft(1), RequestAcceptance())
    # two of three that were tried were right
    assert short.chances(draft(1), RequestAcceptance())[0] == pytest.approx(2 / 3, abs=0.03)


def test_a_request_whose_drafts_are_wrong_is_expected_less_of_than_others() -> None:
    acceptance, wrong, right = Acceptance(), RequestAcceptance(), RequestAcceptance()
    for _ in range(8):
        acceptance.verified(draft(4), 0, wrong)
        acceptance.verified(draft(4), 4, right)
    first = [acceptance.chances(draft(1), each)[0] for each in (wrong, RequestAcceptance(), right)]
    assert first[0] < 0.5 * first[1] < 0.5 * first[2]
    usual = [acceptance.usual_chance("ngram", each) for each in (wrong, RequestAcceptance(), right)]
    assert usual == sorted(usual)
    assert usual[0] < 0.5 * usual[1]
