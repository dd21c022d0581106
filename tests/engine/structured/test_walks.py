"""Walks through a grammar with drafts right and wrong: no token is taken that may not stand there."""

from __future__ import annotations

import random

import pytest

from baton.engine.structured.ahead import Place
from baton.engine.structured.matcher import GrammarMatcher
from baton.engine.structured.vocabulary import Vocabulary
from tests.engine.structured.answers import GRAMMARS
from tests.engine.structured.test_masks import allowed_by, matcher_of


def drafted(first: GrammarMatcher, output: list[int], size: int, chance: random.Random) -> list[int]:
    """Tokens that may follow, and one that may not perhaps."""
    drafts, walk = list[int](), first.fork(output)
    for _ in range(chance.randrange(1, 8)):
        if walk.is_complete or walk.error:
            break
        drafts.append(chance.choice(allowed_by(walk)))
        walk.take(drafts[-1])
    if drafts and chance.random() < 0.3:
        drafts[chance.randrange(len(drafts))] = chance.randrange(size)
    return drafts


def sampled(places: list[GrammarMatcher | Place], drafts: list[int], size: int, chance: random.Random) -> list[int]:
    """A token for each place: the draft there, mostly, or another, drawn again where it is refused."""
    tokens, refused = list[int](), list[int]()
    for number, place in enumerate(places):
        tokens.append(drafts[number] if number < len(drafts) and chance.random() < 0.8 else chance.randrange(size))
        if not place.accepts(tokens[-1]):
            refused.append(number)
    for number in refused:
        mask = places[number].mask() or b""
        tokens[number] = chance.choice([bit for bit in range(8 * len(mask)) if mask[bit >> 3] >> (bit & 7) & 1])
    for number in refused:
        places[number].accepts(tokens[number])
    return tokens


@pytest.mark.parametrize("first_seed", range(500, 1250, 250))
def test_tokens_behind_drafts_are_those_that_the_output_allows(first_seed: int, vocabulary: Vocabulary) -> None:
    first, size = matcher_of(vocabulary, GRAMMARS["schema"][0]), vocabulary.tokens.vocab_size
    for seed in range(first_seed, first_seed + 250):
        chance, matcher, output = random.Random(seed), first.fork(()), list[int]()
        while not matcher.is_complete and len(output) < 90:
            drafts = drafted(first, output, size, chance) if chance.random() < 0.7 else []
            drafts = drafts[: matcher.num_allowed(drafts)] if drafts else []
            places: list[GrammarMatcher | Place] = [
                matcher,
                *(matcher.behind(number) for number in range(1, len(drafts) + 1)),
            ]
            tokens = sampled(places, drafts, size, chance)
            count = next((place for place, draft in enumerate(drafts) if tokens[place] != draft), len(drafts))
            for number, token_id in enumerate(tokens[: count + 1]):
                assert not number or matcher.accepts(token_id), (seed, output)
                matcher.take(token_id)
                output.append(token_id)
                if matcher.is_complete:
                    break
