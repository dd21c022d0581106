"""How often drafts are right: what is expected of one, from those that were verified.

Owns what was seen, by method and confidence for all requests, and by request against that. Older drafts count less and
less. Knows no costs: what a chance is worth is `baton.engine.scheduler.draft_depth`'s.

A token counts as tried when all before it were right: nothing is known of those behind the first wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.scheduler.proposer import Draft

_NUM_LEVELS = 8
_LEVEL_WEIGHT, _LEVEL_KEPT = 6.0, 0.995
"""A confidence is believed as if so many tokens had shown it; a tried token keeps so much of its weight after another
one of its level."""
_REQUEST_WEIGHT, _REQUEST_KEPT = 1.0, 0.93
"""The same of a request, whose weight falls with each of its drafts."""
_FORGOTTEN = 0.8
"""What is left after a rest of what a request's drafts have shown, or those of a method: they are tried again."""
_MOST = 0.995
_FIRST_CHANCE = 0.7
"""Of a token of a method that has shown nothing yet."""


@dataclass(slots=True)
class RequestAcceptance:
    """The drafts of one method for one request: tokens that were expected to be right, and those that were."""

    expected: float = 0.0
    accepted: float = 0.0

    @property
    def factor(self) -> float:
        """How much more often its drafts are right than others with the same confidence."""
        return (self.accepted + _REQUEST_WEIGHT) / (self.expected + _REQUEST_WEIGHT)

    def fade(self) -> None:
        """Some time has passed: what was seen counts less."""
        self.expected *= _FORGOTTEN
        self.accepted *= _FORGOTTEN


@dataclass(slots=True)
class _Level:
    tried: float = 0.0
    accepted: float = 0.0

    def fade(self) -> None:
        self.tried *= _FORGOTTEN
        self.accepted *= _FORGOTTEN


@dataclass(slots=True)
class _Method:
    levels: list[_Level] = field(default_factory=lambda: [_Level() for _ in range(_NUM_LEVELS)])
    all: _Level = field(default_factory=_Level)


class Acceptance:
    """Learns from each verified draft."""

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}

    def usual_chance(self, method: str, seen: RequestAcceptance) -> float:
        """That a token of a draft of which nothing is known yet is right when those before it are."""
        known = self._methods.get(method)
        level = _Level() if known is None else known.all
        chance = (level.accepted + _LEVEL_WEIGHT * _FIRST_CHANCE) / (level.tried + _LEVEL_WEIGHT)
        return min(_MOST, chance * seen.factor)

    def declined(self, method: str, seen: RequestAcceptance) -> None:
        """No draft was made of a request, because of its usual chance. What that stands on counts less: a method that
        nobody tries shows nothing, and one bad answer would rule it out for good."""
        seen.fade()
        if (known := self._methods.get(method)) is not None:
            known.all.fade()

    def chances(self, draft: Draft, seen: RequestAcceptance) -> list[float]:
        """For each token of `draft` the chance that it and all before it are right."""
        factor, product, found = seen.factor, 1.0, []
        for confidence in draft.confidences[: len(draft.token_ids)]:
            product *= min(_MOST, factor * self._chance(draft.method, confidence))
            found.append(product)
        return found

    def verified(self, draft: Draft, num_accepted: int, seen: RequestAcceptance) -> None:
        """Of `draft`, of the request that `seen` is of, the first `num_accepted` tokens were right."""
        method = self._methods.setdefault(draft.method, _Method())
        tried = draft.confidences[: min(num_accepted + 1, len(draft.token_ids))]
        seen.expected = seen.expected * _REQUEST_KEPT + sum(self._chance(draft.method, each) for each in tried)
        seen.accepted = seen.accepted * _REQUEST_KEPT + num_accepted
        for place, confidence in enumerate(tried):
            for level in (method.levels[_level(confidence)], method.all):
                level.tried = level.tried * _LEVEL_KEPT + 1.0
                level.accepted = level.accepted * _LEVEL_KEPT + (place < num_accepted)

    def _chance(self, method: str, confidence: float) -> float:
        known = self._methods.get(method)
        if known is None:
            return confidence
        level = known.levels[_level(confidence)]
        return (level.accepted + _LEVEL_WEIGHT * confidence) / (level.tried + _LEVEL_WEIGHT)


def _level(confidence: float) -> int:
    return min(_NUM_LEVELS - 1, max(0, int(confidence * _NUM_LEVELS)))


def product_of(chance: float, count: int) -> Sequence[float]:
    """The chances that the first one, two and up to `count` tokens are right, where each has this `chance`."""
    return [chance**place for place in range(1, count + 1)]
