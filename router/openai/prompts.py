"""Turns validated requests into token ids by chat template and tokenizer, off the event loop when that takes long.

Owns the checkpoint's text side. Knows no nodes and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from router.openai.prompt_report import prompt_text
from router.openai.schemas import ChatCompletionRequest, CompletionRequest
from wire.errors import InvalidRequest

_MAX_INLINE_CHARS = 4096
_TIMEOUT_S = 10.0
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Turns requests into token ids with one checkpoint's tokenizer and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @classmethod
    def from_folder(cls, folder: Path) -> PromptMaker:
        """Raises `ModelLoadError` when the checkpoint has no usable tokenizer."""
        return cls(Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder))

    async def chat_prompt(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of the conversation. Raises `InvalidRequest` when the template refuses it."""
        size = sum(len(message.content) for message in request.messages)

        def make() -> list[int]:
            text = self.template.render(
                request.template_messages(),
                add_generation_prompt=request.add_generation_prompt,
                **request.chat_template_kwargs,
            )
            # templates write their own special tokens
            return self.tokenizer.encode(text, add_special_tokens=False)

        return _not_empty(await _off_loop(make, size), "messages")

    async def completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises `InvalidRequest` for ids outside the vocabulary."""
        request.check_vocabulary(self.tokenizer.vocab_size)
        size = sum(len(prompt) for prompt in request.prompt)

        def make() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt
            ]

        return [_not_empty(ids, "prompt") for ids in await _off_loop(make, size)]

    async def echoes(self, request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The texts of `prompts`, which are the prompts of `request`, to be echoed; none where none are wanted. A text
        comes back as it was sent."""
        if not request.echo:
            return []

        def make() -> list[str]:
            return [
                sent if isinstance(sent, str) else prompt_text(self.tokenizer, ids, is_all=not request.generates)
                for sent, ids in zip(request.prompt, prompts, strict=True)
            ]

        return await _off_loop(make, sum(map(len, prompts)))

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences by which a model would write `words`: each at the beginning of a text, and behind a
        space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, " " + bare):
                if ids := self.tokenizer.encode(text, add_special_tokens=False):
                    found[tuple(ids)] = None
        return tuple(found)


async def _off_loop(make: Callable[[], ResultT], size: int) -> ResultT:
    """Run `make`: on the event loop for short texts, in a thread for long ones, which would delay all other streams."""
    if size <= _MAX_INLINE_CHARS:
        return make()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.to_thread(make)
    except TimeoutError:
        raise InvalidRequest(f"preparing the prompt took longer than {_TIMEOUT_S:g} s") from None


def _not_empty(token_ids: list[int], param: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(f"{param} holds no tokens", param)
    return token_ids
