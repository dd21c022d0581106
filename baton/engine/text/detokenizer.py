"""Turns a stream of token ids into a stream of text.

Owns the state of one stream. Invariants: text that was returned never changes; joined together the returned
texts equal the decoding of all ids at once, however the ids were split; the work per token does not depend
on how much came before.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from baton.engine.text.tokenizer import Tokenizer

# An unfinished UTF-8 character is at most 3 bytes, hence at most 3 tokens, and one more shows that text
# came before.
_NUM_CONTEXT_TOKENS = 4


class IncrementalDetokenizer:
    """The text of one answer, as its tokens arrive."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_special_ids: Set[int] = frozenset(),
    ) -> None:
        """`prompt_ids` is what precedes the stream: it decides whether a leading space belongs to the text
        and may hold the first bytes of a character. If the stream finishes that character, its text begins
        with the whole of it; if not, those bytes are no part of it. The prompt's own text is not returned.
        `shown_special_ids` are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_special_ids = shown_special_ids
        self._stages = tokenizer.new_decoder()
        pieces = self._context(prompt_ids)
        for stage in self._stages if pieces else ():
            pieces = stage.push(pieces) + stage.settle()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is now final; possibly none."""
        pieces: list[str] = []
        for token_id in token_ids:
            piece = self._piece(token_id)
            if piece is not None:
                pieces.append(piece)
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def settle(self) -> str:
        """End the prompt here. Returns the held text, but for the first bytes of a character that the text after it may
        finish."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.settle()
        return "".join(pieces)

    def finish(self) -> str:
        """No more ids come: return the held text, with U+FFFD for what stayed an unfinished character."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = stage.push(pieces) + stage.flush()
        return "".join(pieces)

    def _piece(self, token_id: int) -> str | None:
        skips = self._skip_special_tokens and token_id not in self._shown_special_ids
        return self._tokenizer.vocabulary_piece(token_id, skips)

    def _context(self, prompt_ids: Sequence[int]) -> list[str]:
        """The last pieces of the prompt that have text; the whole prompt could be long and changes nothing
        more."""
        context: list[str] = []
        for token_id in reversed(prompt_ids):
            piece = self._piece(token_id)
            if piece is not None:
                context.append(piece)
            if len(context) == _NUM_CONTEXT_TOKENS:
                break
        return context[::-1]
