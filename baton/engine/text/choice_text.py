"""Turns the tokens of one choice into the text that its client gets, and everything that must match that text.

Owns, per choice: the detokenizer, the stop strings, the count of completion tokens, why the choice ended, and which
tokens (with their log probabilities) belong to which piece of text. Does not know HTTP, nodes or requests.

Invariants. The deltas' texts joined are the choice's text. A token is reported once, in order, in the delta that
releases the text it ends, so log probabilities never run ahead of the text. A token of which no character survives a
stop string is not reported. The token that made a node stop (end of sequence, stop_token_ids) is reported but adds no
text unless the stop is to be included. After `finish_reason` is set, whatever comes is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, overload

from baton.engine.text.detokenizer import IncrementalDetokenizer
from baton.engine.text.stop_strings import StopStringMatcher
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidMessage
from baton.wire.messages.output import FINISH_COMPLETE, FINISH_STOP, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The options of a request that concern its text. Stop strings count only after `min_tokens` tokens.

    `detokenize` False: the choice has tokens and no text, so it may have no stop strings either. `tokens_as_ids`: the
    text of a scored token is "token_id:" and its id. `shown_special_ids` have text although others are skipped.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    detokenize: bool = True
    tokens_as_ids: bool = False
    shown_special_ids: frozenset[int] = frozenset()


class ScoredToken(NamedTuple):
    """A token as text and bytes, and the natural logarithm of its probability."""

    text: str
    data: bytes
    logprob: float
    token_id: int


class TopTokens(Sequence[ScoredToken]):
    """The most likely tokens at one place, best first. Text and bytes are looked up when somebody reads them. An answer
    may hold a million of these tokens for as long as it is generated."""

    __slots__ = ("_as_ids", "_logprobs", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, logprobs: TokenLogprobs, as_ids: bool = False) -> None:
        """`as_ids`: see `TextOptions.tokens_as_ids`."""
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._as_ids = as_ids

    def __len__(self) -> int:
        return len(self._logprobs.top_ids)

    @overload
    def __getitem__(self, index: int) -> ScoredToken: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ScoredToken, ...]: ...

    def __getitem__(self, index: int | slice) -> ScoredToken | tuple[ScoredToken, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return score(self._tokenizer, self._logprobs.top_ids[index], self._logprobs.top_logprobs[index], self._as_ids)

    def __iter__(self) -> Iterator[ScoredToken]:
        logprobs = self._logprobs
        return map(score, repeat(self._tokenizer), logprobs.top_ids, logprobs.top_logprobs, repeat(self._as_ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def score(tokenizer: Tokenizer, token_id: int, logprob: float, as_id: bool = False) -> ScoredToken:
    """The token as text and bytes, with its log probability. `as_id`: its text is "token_id:" and its id."""
    text = f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)
    return ScoredToken(text, tokenizer.token_bytes(token_id), logprob, token_id)


class TokenEntry(NamedTuple):
    """One reported token. `text_offset` is where its text begins, in characters from the beginning of the choice.

    `chosen` is None when the request asked for no log probabilities; `top` are the most likely tokens, best first.
    `is_end`: it made the node stop, and is no part of the text.
    """

    token_id: int
    text_offset: int
    chosen: ScoredToken | None = None
    top: Sequence[ScoredToken] = ()
    is_end: bool = False


class TextDelta(NamedTuple):
    """The next piece of a choice. `finish_reason` is None while the choice goes on; it comes with the last piece.

    Like `TokenEntry` a tuple, because there is one for each token.
    """

    text: str
    entries: Sequence[TokenEntry] = ()
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to tell the client."""
        return not self.text and not self.entries and self.finish_reason is None


EMPTY_DELTA = TextDelta("")


def join_deltas(deltas: Iterable[TextDelta]) -> TextDelta:
    """All pieces of a choice as one, for an answer that is not streamed."""
    pieces = tuple(deltas)
    return TextDelta(
        "".join(piece.text for piece in pieces),
        tuple(entry for piece in pieces for entry in piece.entries),
        next((piece.finish_reason for piece in pieces if piece.finish_reason is not None), None),
    )


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, prompt_ids: Sequence[int] = (), text_offset: int = 0
    ) -> None:
        """`prompt_ids` precede the choice and decide about a leading space. `text_offset`: what the offsets of tokens
        begin with, in characters. Raises `InvalidRequest` for a bad stop."""
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids, options.skip_special_tokens, options.shown_special_ids
        )
        self._matcher = StopStringMatcher(options.stop, options.include_stop) if options.stop else None
        # characters out of the detokenizer; the matcher may hold some of them
        self._num_decoded = self._num_released = text_offset
        # tokens not reported yet; and, for those whose text is decoded, the place where that text ends
        self._pending: list[TokenEntry] = []
        self._ends: list[int] = []
        self._num_completion_tokens = 0
        self._finish_reason: str | None = None
        self.stop_string: str | None = None
        """The stop string that ended the choice."""

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended: the node's reason, or "stop" for a stop string; None while it goes on.

        When it is set although the node has sent none, the request has to be cancelled at the node.
        """
        return self._finish_reason

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated for this choice, up to and including the one that ended it."""
        return self._num_completion_tokens

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), node_finish_reason: str = ""
    ) -> TextDelta:
        """Take the next tokens, as `TokenEvent` carries them, and return what will not change any more; possibly
        nothing.

        Raises `InvalidMessage` when `logprobs` is neither empty nor one per token.
        """
        is_silent_end = node_finish_reason == FINISH_STOP
        if node_finish_reason == FINISH_COMPLETE:
            node_finish_reason = FINISH_STOP
        if logprobs and len(logprobs) != len(token_ids):
            raise InvalidMessage(f"{len(token_ids)} tokens came with {len(logprobs)} log probabilities")
        if self._finish_reason is not None:
            return EMPTY_DELTA
        if not self._options.detokenize:
            return self._push_without_text(token_ids, logprobs, node_finish_reason)
        pieces: list[str] = []
        for position, token_id in enumerate(token_ids):
            self._num_completion_tokens += 1
            self._pending.append(self._entry(token_id, logprobs[position] if logprobs else None))
            is_silent = is_silent_end and position == len(token_ids) - 1
            if is_silent and not self._options.include_stop:
                self._pending[-1] = self._pending[-1]._replace(is_end=True)
                continue
            pieces.append(self._release(self._detokenizer.push((token_id,))))
            if self._finish_reason is not None:
                return self._cut("".join(pieces))
        if node_finish_reason:
            return self._finish(pieces, node_finish_reason)
        return TextDelta("".join(pieces), self._take_released())

    def _push_without_text(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], node_finish_reason: str
    ) -> TextDelta:
        self._num_completion_tokens += len(token_ids)
        self._finish_reason = node_finish_reason or None
        scores: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        return TextDelta("", tuple(map(self._entry, token_ids, scores)), self._finish_reason)

    def _finish(self, pieces: list[str], node_finish_reason: str) -> TextDelta:
        """The node is done: nothing is held back any longer."""
        pieces.append(self._release(self._detokenizer.finish()))
        if self._finish_reason is not None:
            return self._cut("".join(pieces))
        if self._matcher is not None:
            pieces.append(self._matcher.finish())
        self._finish_reason = node_finish_reason
        entries, self._pending = tuple(self._pending), []
        return TextDelta("".join(pieces), entries, node_finish_reason)

    def _release(self, decoded: str) -> str:
        """The part of the text so far that is certain, after `decoded` was added to it."""
        if not decoded:
            return ""
        self._num_decoded += len(decoded)
        # a token without text of its own, such as a part of a character, shares the end of the next that has some
        self._ends += [self._num_decoded] * (len(self._pending) - len(self._ends))
        released = decoded
        if self._matcher is not None and self._num_completion_tokens > self._options.min_tokens:
            result = self._matcher.push(decoded)
            released = result.text
            if result.stop is not None:
                self._finish_reason, self.stop_string = FINISH_STOP, result.stop
        self._num_released += len(released)
        return released

    def _take_released(self) -> tuple[TokenEntry, ...]:
        """The pending tokens whose text has been released to its end."""
        num_taken = 0
        for end in self._ends:
            if end > self._num_released:
                break
            num_taken += 1
        taken = tuple(self._pending[:num_taken])
        del self._pending[:num_taken], self._ends[:num_taken]
        return taken

    def _cut(self, text: str) -> TextDelta:
        """A stop string appeared: keep the pending tokens that have at least one character before the cut."""
        entries = tuple(entry for entry in self._pending if entry.text_offset < self._num_released)
        self._pending = []
        return TextDelta(text, entries, self._finish_reason)

    def _entry(self, token_id: int, logprobs: TokenLogprobs | None) -> TokenEntry:
        if logprobs is None:
            return TokenEntry(token_id, self._num_decoded)
        as_ids = self._options.tokens_as_ids
        chosen = score(self._tokenizer, token_id, logprobs.logprob, as_ids)
        return TokenEntry(token_id, self._num_decoded, chosen, TopTokens(self._tokenizer, logprobs, as_ids))
