"""A place behind drafts is where the output would be if it had these tokens, in whatever order places are asked."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from baton.engine.structured.matcher import WORN_OUT, GrammarMatcher, Grammars
from baton.engine.structured.vocabulary import Vocabulary
from baton.wire.grammar import Grammar
from tests.engine.structured.answers import GRAMMARS
from tests.engine.structured.test_masks import allowed_by, matcher_of


def _walked(matcher: GrammarMatcher, output: Sequence[int], count: int, chance: random.Random) -> list[int]:
    """Tokens that may follow `output`, up to the one that completes it."""
    walked, found = matcher.fork(output), list[int]()
    while len(found) < count and not walked.is_complete:
        found.append(chance.choice(allowed_by(walked)))
        walked.take(found[-1])
    return found


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_place_allows_what_the_output_does_there(name: str, vocabulary: Vocabulary) -> None:
    first, chance = matcher_of(vocabulary, GRAMMARS[name][0]), random.Random(5)
    for _ in range(3):
        output, matcher = list[int](), first.fork(())
        while not matcher.is_complete and len(output) < 60:
            drafts = _walked(first, output, 5, chance)
            num_allowed = matcher.num_allowed((*drafts, vocabulary.tokens.vocab_size + 3))
            assert num_allowed == len(drafts) - _completes(first, output, drafts)
            if drafts[:-1]:
                refused = _refused(first.fork((*output, *drafts[:-1])), vocabulary)
                assert matcher.num_allowed((*drafts[:-1], refused, drafts[-1])) == len(drafts) - 1
                assert matcher.num_allowed(drafts) == num_allowed
            for number in chance.sample(range(num_allowed + 1), num_allowed + 1):
                here, place = first.fork((*output, *drafts[:number])), matcher.behind(number)
                allowed = allowed_by(here)
                for token_id in range(vocabulary.tokens.vocab_size + 9):
                    assert place.accepts(token_id) == (token_id in allowed)
                assert place.mask() == here.mask()
                matcher.accepts(drafts[0])  # not taken
            for token_id in drafts[: chance.randrange(1, len(drafts) + 1)]:
                output.append(token_id)
                matcher.take(token_id)
            _require_same(matcher, first.fork(output))


def _completes(first: GrammarMatcher, output: Sequence[int], drafts: Sequence[int]) -> bool:
    """Whether the last draft completes the output."""
    matcher = first.fork((*output, *drafts[:-1]))
    matcher.take(drafts[-1])
    return matcher.is_complete


def _refused(matcher: GrammarMatcher, vocabulary: Vocabulary) -> int:
    allowed = set(allowed_by(matcher))
    return next(token_id for token_id in range(vocabulary.tokens.vocab_size + 1) if token_id not in allowed)


def _require_same(matcher: GrammarMatcher, other: GrammarMatcher) -> None:
    """As the scheduler sees them, behind a token that was taken."""
    assert other.mask() is not None or other.is_complete
    assert (matcher.is_complete, matcher.leaves_choice) == (other.is_complete, other.leaves_choice)
    if not matcher.is_complete:
        assert matcher.mask() == other.mask()


def test_a_matcher_that_has_failed_allows_none(vocabulary: Vocabulary) -> None:
    matcher = matcher_of(vocabulary, GRAMMARS["lark"][0])
    matcher.fail("it may not")
    assert matcher.num_allowed((1, 2)) == 0


def test_states_that_drafts_have_reached_end_no_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.structured.vocabulary.MAX_LEXER_STATES", 150)
    grammars, grammar = Grammars(lambda: vocabulary), Grammar.regex("a{99}|b{99}")
    first, second = (vocabulary.tokens.tokenize_str(letter * 99) for letter in "ab")
    matcher = grammars.matcher(grammar, ())
    assert matcher.num_allowed(second) == len(second) - 1  # the last completes it
    for token_id in first:
        matcher.take(token_id)
    assert matcher.mask() is None
    assert matcher.error == WORN_OUT
    # and where the output was first, the drafts end
    matcher, other = grammars.matcher(grammar, first[:-1]), grammars.matcher(grammar, ())
    assert matcher.mask() is not None
    assert 0 < other.num_allowed(second) < len(second) - 1
    assert other.num_allowed(second) == 0
