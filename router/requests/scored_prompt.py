"""The log probabilities of one prompt at the router, as its node tells them.

Owns their completeness: they are delivered once and whole, in the order of the prompt. They stay bytes until an answer
is written (see `baton.wire.prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.wire.messages import PromptLogprobs
from baton.wire.prompt_logprobs import PromptTokenLogprobs, read_rows


@dataclass(slots=True)
class ScoredPrompt:
    """Of a prompt of `num_tokens`. The first token has none, so a prompt of one token is whole at once."""

    num_tokens: int
    num_top: int = 0
    _num_known: int = 1
    _pieces: list[bytes] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._num_known >= self.num_tokens

    def add(self, scored: PromptLogprobs) -> None:
        """The next piece. Raises `ValueError` when it is another one, or of another kind."""
        is_first = not self._pieces
        if scored.first != self._num_known or self._num_known + scored.num_rows > self.num_tokens:
            raise ValueError(f"log probabilities of prompt token {self._num_known} never came, {scored.first} did")
        if not is_first and scored.num_top != self.num_top:
            raise ValueError("log probabilities of a prompt changed their kind")
        self.num_top = scored.num_top
        self._num_known += scored.num_rows
        self._pieces.append(scored.rows)

    def begin_again(self) -> None:
        """Another attempt begins, which tells everything anew unless nothing is missing."""
        if not self.is_whole:
            self._num_known = 1
            self._pieces.clear()

    def rows(self) -> Iterator[PromptTokenLogprobs]:
        """What is known, of the second token and those after it."""
        for piece in self._pieces:
            yield from read_rows(piece, self.num_top)
