"""How many tokens of one request's prompt its nodes found in their prefix caches.

Owns the reading of what nodes report in their first tokens. A prefill node reports its own number with token 1, which
the decode node repeats with that number; the decode node reports its own from token 2 on: the part of the prompt whose
KV did not have to be sent. Only a request's first attempt counts, because a later one finds what the first left behind.
"""

from __future__ import annotations

from baton.wire.messages import DECODE, PREFILL, TokenEvent


class CachedTokens:
    """`by_role` has an entry for each role that has reported. `awaits_more` is False once no further report counts."""

    def __init__(self) -> None:
        self.by_role: dict[str, int] = {}
        self.awaits_more = False
        self._is_split = False

    def begin(self, attempt: int, *, is_split: bool) -> None:
        """An attempt begins. `is_split`: a prefill node computes its prompt."""
        self.awaits_more = attempt == 1
        self._is_split = is_split

    def note(self, event: TokenEvent, *, is_of_decode: bool) -> None:
        """Take an event of the attempt that began last."""
        if self._is_split and event.index == 0:
            self.by_role[PREFILL] = event.num_cached_tokens
        elif is_of_decode:
            self.by_role[DECODE] = event.num_cached_tokens
            self.awaits_more = False
