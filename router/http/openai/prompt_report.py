"""What an answer tells of its prompt: the text (`echo`), and log probabilities of its tokens in two formats.

Owns both formats: the four lists of `logprobs` in /v1/completions, which begin with the prompt's tokens when it is
echoed, and vLLM's `prompt_logprobs`. Does not know nodes: the log probabilities come as a `ScoredPrompt`. A long prompt
is rendered in a thread, because the event loop serves other streams meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.text.choice_text import ScoredToken
from baton.engine.text.detokenizer import IncrementalDetokenizer
from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.openai.logprob_formats import completion_token, finite_logprob
from baton.router.http.openai.replies import PromptReport
from baton.router.requests.output import ScoredPrompt
from baton.wire.errors import InvalidRequest

MAX_ENTRIES = 2**17
"""The log probabilities of prompt tokens, alternatives included, that one answer may hold: some 8 MB of JSON."""
_MAX_INLINE_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request wants to be told of its prompt. `echo`: the text comes back before the answer's.

    `num_echoed`, `num_listed`: alternatives beside each prompt token in `logprobs` and in `prompt_logprobs`; None: the
    answer has no log probabilities of the prompt there.
    """

    echo: bool = False
    num_echoed: int | None = None
    num_listed: int | None = None

    @property
    def num_wanted(self) -> int | None:
        """Alternatives that the node has to report, None when no log probabilities of the prompt are wanted."""
        wanted = [number for number in (self.num_echoed, self.num_listed) if number is not None]
        return max(wanted) if wanted else None

    def check_size(self, num_prompt_tokens: int) -> None:
        """Raise `InvalidRequest` when an answer would hold more than `MAX_ENTRIES` of `num_prompt_tokens` tokens, which
        are those of all prompts, each counted for each of its choices."""
        for param, number in (("logprobs", self.num_echoed), ("prompt_logprobs", self.num_listed)):
            if number is not None and num_prompt_tokens * (number + 1) > MAX_ENTRIES:
                raise InvalidRequest(
                    f"{param} {number} over {num_prompt_tokens} prompt tokens is more than {MAX_ENTRIES} log "
                    "probabilities: ask for fewer alternatives, or send fewer prompts at once",
                    param,
                )


def prompt_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], *, is_all: bool) -> str:
    """The text of a prompt of token ids, special tokens included. `is_all`: no text comes after it that could finish a
    character."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    begun = detokenizer.push(prompt_ids)
    return begun + (detokenizer.finish() if is_all else detokenizer.settle())


async def report_prompt(
    tokenizer: Tokenizer,
    options: PromptOptions,
    prompt_ids: Sequence[int],
    text: str,
    scored: ScoredPrompt | None,
) -> PromptReport:
    """What `options` want of a prompt, whose text is `text` when it is echoed. `scored`: whole, where any is wanted."""
    number = options.num_wanted
    if number is None or scored is None:
        return PromptReport(text)

    def render() -> PromptReport:
        return PromptReport(
            text,
            None if options.num_echoed is None else _lists(tokenizer, prompt_ids, text, scored, options.num_echoed),
            None if options.num_listed is None else _listed(tokenizer, prompt_ids, scored, options.num_listed),
        )

    if len(prompt_ids) * (number + 1) <= _MAX_INLINE_ENTRIES:
        return render()
    return await asyncio.to_thread(render)


def _lists(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str, scored: ScoredPrompt, num_top: int
) -> dict[str, list[Any]]:
    """Parallel lists as `logprob_formats.completion_logprobs` makes them. The first token has no log probability."""
    token = _Tokens(tokenizer)
    tokens, logprobs, tops = [token.text(prompt_ids[0])], [None], [None]
    lists: dict[str, list[Any]] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}
    for token_id, row in zip(prompt_ids[1:], scored.rows(), strict=True):
        named = token.text(token_id)
        logprob = finite_logprob(row.logprob)
        best = zip(row.top_ids[:num_top], row.top_logprobs[:num_top], strict=True)
        lists["tokens"].append(named)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(
            {**{token.text(one): finite_logprob(value) for one, value in best}, named: logprob}
        )
    lists["text_offset"] = _offsets(tokenizer, prompt_ids, text)
    return lists


def _offsets(tokenizer: Tokenizer, prompt_ids: Sequence[int], text: str) -> list[int]:
    """Where the text of each token begins in `text`, in characters. Tokens that were put before a text prompt, such as
    the one that begins it, have no place in it and begin at 0."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    ends = [0]
    for token_id in prompt_ids:
        ends.append(ends[-1] + len(detokenizer.push((token_id,))))
    num_before = max(0, ends[-1] + len(detokenizer.settle()) - len(text))
    return [min(max(0, end - num_before), len(text)) for end in ends[:-1]]


def _listed(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scored: ScoredPrompt, num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: for each token but the first, by token id, the prompt's token first."""
    token = _Tokens(tokenizer)
    listed: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], scored.rows(), strict=True):
        best = zip(row.top_ids[:num_top], row.top_logprobs[:num_top], strict=True)
        ranked = [(token_id, row.logprob, row.rank), *((one, value, rank) for rank, (one, value) in enumerate(best, 1))]
        entry: dict[str, Any] = {}
        for one, value, rank in ranked:
            if str(one) not in entry:
                entry[str(one)] = {"logprob": finite_logprob(value), "rank": rank, "decoded_token": token.decoded(one)}
        listed.append(entry)
    return listed


class _Tokens:
    """Tokens as text, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """As `logprobs` of completions names it."""
        if token_id not in self._texts:
            self._texts[token_id] = completion_token(self._scored(token_id))
        return self._texts[token_id]

    def decoded(self, token_id: int) -> str:
        """As vLLM names it: U+FFFD where the token alone is not a whole character."""
        return self._tokenizer.token_text(token_id)

    def _scored(self, token_id: int) -> ScoredToken:
        data = self._tokenizer.token_bytes(token_id)
        return ScoredToken(data.decode(errors="replace"), data, 0.0, token_id)
