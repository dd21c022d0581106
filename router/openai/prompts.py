"""Turns validated requests into token ids by chat template and tokenizer, off the event loop when that takes long.

Owns the checkpoint's text side. Knows no nodes and no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
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

        def make() -> list[int]:
            text = self.template.render(
                request.template_messages(),
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message,
                **request.template_variables(),
            )
            return self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)

        return _not_empty(await off_loop(make, request.num_chars), "messages")

    async def completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises `InvalidRequest` for ids outside the vocabulary."""
        request.check_vocabulary(self.tokenizer.vocab_size)
        size = sum(len(prompt) for prompt in request.prompt)

        def make() -> list[list[int]]:
            return [
                self.tokenizer.encode(prompt, request.add_special_tokens) if isinstance(prompt, str) else list(prompt)
                for prompt in request.prompt
            ]

        return [_not_empty(ids, "prompt") for ids in await off_loop(make, size)]


def truncated(
    request: ChatCompletionRequest | CompletionRequest, prompt_ids: Sequence[int], max_model_len: int | None
) -> Sequence[int]:
    """The part of a prompt that `truncate_prompt_tokens` asks for; -1: as much as leaves room for the output."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None or (num_kept < 0 and max_model_len is None):
        return prompt_ids
    if num_kept < 0 and max_model_len is not None:
        num_kept = max(1, max_model_len - (request.output_limit[1] or 1))
    return prompt_ids[-num_kept:] if request.truncation_side == "left" else prompt_ids[:num_kept]


def cache_salt_of(client_salt: str | None) -> bytes:
    """The salt (32 bytes, or none) for the hashes of a request's blocks: prefixes are shared by equal salts only."""
    return b"" if client_salt is None else hashlib.sha256(b"client\0" + client_salt.encode()).digest()


async def off_loop(make: Callable[[], ResultT], size: int) -> ResultT:
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
