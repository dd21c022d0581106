"""Drafts from texts in suffix automata: what followed most often where the end of a text has been before.

Owns how long such drafts are, and how sure they are. Does not know whose texts are read together.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.native.texts import Texts, TextReader
from baton.engine.scheduler.proposer import Draft
from baton.engine.speculation.text.sources import sureness


@dataclass(frozen=True, slots=True)
class SuffixRules:
    """When a text has drafts, and how long they are.

    `shortest`: tokens at the end of the text that have been before. `spec_factor`: tokens of a draft for each of these,
    of which `max_depth` count; a draft has no more than `max_depth` either. `least_share`: of all that followed, what
    the token has to have been. `method`: the name of the drafts.
    """

    method: str
    shortest: int
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
        """Whether enough of the last tokens have been there before."""
        return self.match >= self._rules.shortest

    def draft(self, max_tokens: int) -> Draft:
        """What has followed most often."""
        rules = self._rules
        longest = min(rules.max_depth, int(rules.spec_factor * min(self.match, rules.max_depth)))
        token_ids, confidences = [], []
        for guess in self.guesses(rules.shortest, min(max_tokens, longest)):
            share = guess.count / guess.total
            if share < rules.least_share:
                break
            token_ids.append(guess.token)
            confidences.append(share * sureness(guess.match))
        return Draft(token_ids, confidences, rules.method)
