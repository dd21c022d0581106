"""Readings: what a request asks of the rows of its prompt beside tokens, and what steps have read of them.

Owns the three values; of a reading only which rows it is made of, and whether tokens are wanted too. What is computed
of the rows is the knowledge of its kind (`baton.engine.runner.readings`); what the bytes mean, that of whoever asked.

A row is what the model computes for one token: hidden states, and logits of the token after it. Each row is read once,
in order, by the step that computes it, so a reading comes in parts: one for each chunk of the prompt.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.wire.request_key import RequestKey


class Reading(Protocol):
    """A value that says what is asked. Its class is its kind."""

    @property
    def with_tokens(self) -> bool:
        """Whether tokens are to be sampled, too. Without, the request has ended when all is read."""
        ...

    def rows(self, num_prompt_tokens: int) -> range:
        """The neighbouring rows of such a prompt that it is made of. KV of these is never taken from a cache."""
        ...


class ReadSpan(NamedTuple):
    """The rows of one request's share that are to be read: `num_rows` from `first_row` on, counted in its tokens."""

    key: RequestKey
    reading: Reading
    first_row: int
    num_rows: int


class RowsRead(NamedTuple):
    """What was read of these rows, as bytes of the reading's kind. `is_valid`: the model computed numbers for all."""

    first_row: int
    num_rows: int
    values: bytes
    is_valid: bool
