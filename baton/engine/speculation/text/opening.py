"""Opens the sources of drafts from text: automata of the compiled library, or a plain search where that is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import CDLL
from functools import partial

from baton.engine.native.library import load_library
from baton.engine.native.texts import Texts
from baton.engine.scheduler.request import Request
from baton.engine.speculation.text.ngrams import NgramText
from baton.engine.speculation.text.proposer import MAX_OWN_TOKENS, Sources
from baton.engine.speculation.text.suffixes import SuffixRules, SuffixText
from baton.engine.speculation.text.tenants import TenantTexts

_USUAL_OUTPUT = 256
_log = logging.getLogger(__name__)


def open_sources(
    rules: SuffixRules, longest: int, max_outputs: int, load: Callable[[], CDLL] = load_library
) -> Sources:
    """`longest`: the tokens that a plain search looks for. `max_outputs`: how many outputs of a tenant are kept, none
    with 0."""
    try:
        library = load()
    except OSError as error:
        _log.warning("drafts are searched for in the last tokens of each request alone: %s", error)
        return Sources(lambda request: NgramText(rules.shortest, max(rules.shortest, longest)))

    def own(request: Request) -> SuffixText:
        expected = request.num_known_tokens + _USUAL_OUTPUT
        return SuffixText(Texts(library, MAX_OWN_TOKENS // 2, num_expected=expected), rules)

    if not max_outputs:
        return Sources(own)
    tenants = TenantTexts(partial(Texts, library, max_texts=max(1, max_outputs // 2)))
    return Sources(own, lambda request: SuffixText(tenants.of(request.hash_root), rules))
