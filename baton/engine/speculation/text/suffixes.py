"""Drafts from texts in suffix automata: what followed most often where the end of a text has been before.

Owns how long such drafts are, and how sure they are. Does not know whose texts are read together.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.native.texts import TextReader, Texts
from baton.engine.scheduler.proposer import Draft
from baton.engine.speculation.text.sources import sureness


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """When a text has drafts, and how long they are.

    `shortest`: tokens at the end of the text that have been before. `least_sure`: the first token is at least so sure.
    `spec_factor`: tokens of a draft for each of the tokens that have been before, of which `max_depth` count; a draft
    has no more than `max_depth` either. `least_share`: of all that followed, what a token has to have been.
    `method`: the name of the drafts.
    """

    method: str
    shortest: int
    least_sure: float
    spec_factor: float
    max_depth: int
    least_share: float


class SuffixText(TextReader):
    """A text that is added to `texts`, and drafts from what they say."""

    def __init__(self, texts: Texts, rules: SuffixRules) -> None:
        super().__init__(texts)
        self._rules = rules

    @property
    def has_draft(self) -> bool:
        """Whether enough of the last tokens have been there before, and say enough."""
        first, rules = self.first, self._rules
        return first.match >= rules.shortest and first.count * sureness(first.match) >= rules.least_sure * first.total

    def draft(self, max_tokens: int) -> Draft:
        """What has followed most often."""
        rules, token_ids, confidences = self._rules, list[int](), list[float]()
        longest = min(rules.max_depth, int(rules.spec_factor * min(self.first.match, rules.max_depth)))
        for guess in self.guesses(min(max_tokens, longest)):
            share = guess.count / guess.total
            if share < rules.least_share:
                break
            token_ids.append(guess.token)
            confidences.append(share * sureness(guess.match))
        return Draft(token_ids, confidences, rules.method)
