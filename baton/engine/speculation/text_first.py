"""Drafts of text where they are sure, and of a model or a head where they are not.

A draft from text costs nothing. Where a request copies it is right more often than a model's, and longer. Owns which of
the two a request gets in a step, and that a model that cannot be computed costs no request: it is asked no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from baton.device.base import DeviceFailed
from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Proposer, Wanted
from baton.engine.scheduler.request import Request
from baton.wire.request_key import RequestKey

_SURE = 0.7
"""The confidence from which text comes first."""
_log = logging.getLogger(__name__)


class TextFirst:
    """Asks `text`, then `model`, unless that is declined. See `Proposer`."""

    def __init__(self, text: Proposer, model: Proposer, is_declined: Callable[[Request], bool]) -> None:
        self.method = model.method
        self.stores_kv = model.stores_kv
        self._text = text
        self._model = model
        self._is_declined = is_declined
        self._sure: set[RequestKey] = set()
        self._has_failed = False

    def follows(self, request: Request) -> bool:
        """Whether one of them has a draft. Text is asked in any case: it is read as it comes."""
        has_text = self._text.follows(request)
        return has_text or self._model_follows(request)

    def cost(self, request: Request) -> DraftCost:
        """Nothing where the text is sure."""
        if self._is_sure(request):
            self._sure.add(request.key)
            return FREE
        self._sure.discard(request.key)
        return self._model.cost(request) if self._model_follows(request) else FREE

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """Each from one of them."""
        from_text = [each.request.key in self._sure or not self._model_follows(each.request) for each in wanted]
        parts: tuple[list[Wanted], list[Wanted]] = ([], [])
        for each, is_text in zip(wanted, from_text, strict=True):
            parts[is_text].append(each)
        model, text = iter(self._of_model(parts[False])), iter(self._text.propose(parts[True]))
        return [next(text if is_text else model) for is_text in from_text]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Both may learn."""
        self._text.verified(request, draft, num_accepted)
        self._model.verified(request, draft, num_accepted)

    def forget(self, request: Request) -> None:
        """Both forget it."""
        self._sure.discard(request.key)
        self._text.forget(request)
        self._model.forget(request)

    def _of_model(self, wanted: Sequence[Wanted]) -> Sequence[Draft]:
        if not wanted:
            return ()
        try:
            return self._model.propose(wanted)
        except DeviceFailed:
            raise
        except Exception:  # a draft is never worth a request
            _log.exception("drafts come from text alone from now on: %s could not be computed", self.method)
            self._has_failed = True
            return [NO_DRAFT] * len(wanted)

    def _model_follows(self, request: Request) -> bool:
        return not self._has_failed and not self._is_declined(request) and self._model.follows(request)

    def _is_sure(self, request: Request) -> bool:
        if not self._text.follows(request):
            return False
        (draft,) = self._text.propose([Wanted(request, 1)])
        return bool(draft.token_ids) and draft.confidences[0] >= _SURE
