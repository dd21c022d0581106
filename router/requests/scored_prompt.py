"""The log probabilities of one prompt at the router, as its node tells them.

Owns their completeness: they are delivered once and whole, in the order of the prompt. They stay bytes until an answer
is written (see `baton.wire.prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.wire.messages import PromptRead
from baton.wire.prompt_logprobs import PromptTokenLogprobs, num_top_of, read_rows


@dataclass(slots=True)
class ScoredPrompt:
    """Of a prompt of `num_tokens`. The first token has none, so a prompt of one token is whole at once."""

    num_tokens: int
    num_top: int = 0
    _num_known: int = 1
    _pieces: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._num_known >= self.num_tokens

    def add(self, read: PromptRead) -> None:
        """The next piece. Raises `ValueError` when it is another one, or of another kind."""
        first = read.first_row + 1
        if first != self._num_known or self._num_known + read.num_rows > self.num_tokens:
            raise ValueError(f"log probabilities of prompt token {self._num_known} never came, {first} did")
        num_top = num_top_of(read.values, read.num_rows)
        if self._pieces and num_top != self.num_top:
            raise ValueError("log probabilities of a prompt changed their kind")
        self.num_top = num_top
        self._num_known += read.num_rows
        self._pieces.append((read.values, read.num_rows))

    def begin_again(self) -> None:
        """Another attempt begins, which tells everything anew unless nothing is missing."""
        if not self.is_whole:
            self._num_known = 1
            self._pieces.clear()

    def rows(self) -> Iterator[PromptTokenLogprobs]:
        """What is known, of the second token and those after it."""
        for values, num_rows in self._pieces:
            yield from read_rows(values, num_rows)
