"""Turns validated requests into token ids by chat template and tokenizer, off the event loop when that takes long.

Owns the checkpoint's text side. Knows no nodes and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from router.openai.schemas import ChatCompletionRequest, CompletionRequest
from wire.errors import InvalidRequest

_MAX_INLINE_CHARS = 4096
_MAX_SIDE_BY_SIDE_CHARS = 2**17
_TIMEOUT_S = 10.0
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Turns requests into token ids with one checkpoint's tokenizer and chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate
    very_long: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "very long prompts"))

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

        return _not_empty(await self._off_loop(make, size), "messages")

    async def completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises `InvalidRequest` for ids outside the vocabulary."""
        request.check_vocabulary(self.tokenizer.vocab_size)
        size = sum(len(prompt) for prompt in request.prompt)

        def make() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt
            ]

        return [_not_empty(ids, "prompt") for ids in await self._off_loop(make, size)]

    async def _off_loop(self, make: Callable[[], ResultT], size: int) -> ResultT:
        """Run `make`: on the event loop for short texts, in a thread for long ones, which would delay all other
        streams. Very long ones have one thread: each takes a hundred times its size, and what a thread has freed stays
        with that thread."""
        if size <= _MAX_INLINE_CHARS:
            return make()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                executor = self.very_long if size > _MAX_SIDE_BY_SIDE_CHARS else None
                return await asyncio.get_running_loop().run_in_executor(executor, make)
        except TimeoutError:
            raise InvalidRequest(f"preparing the prompt took longer than {_TIMEOUT_S:g} s") from None


def _not_empty(token_ids: list[int], param: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(f"{param} holds no tokens", param)
    return token_ids
