"""Turns validated requests into token ids by chat template and tokenizer, off the event loop when that takes long.

Owns the checkpoint's text side. Knows no nodes and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from baton.engine.text.answers.formats import MARKERS, AnswerFormat, CallsWanted, ParserNames
from baton.engine.text.answers.grammars import AnswerShape
from baton.engine.text.answers.harmony_grammar import HarmonyShape
from baton.engine.text.answers.reader import AnswerParser
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.choice_text import TextOptions
from baton.engine.text.fill_in_middle import FillInMiddle
from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.images import Images, ReadImage, refused_images
from baton.router.http.openai.answer_parts import AnswerParts, ChoiceParts
from baton.router.http.openai.answer_shapes import Reasoning, note_unenforced, note_unshown, shape_of, whole_grammar
from baton.router.http.openai.fields import UNSUPPORTED
from baton.router.http.openai.grammar_checks import GrammarChecks
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.prompt_report import prompt_text
from baton.router.http.openai.request_templates import RequestTemplates
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from baton.runtime.process import return_freed_memory
from baton.runtime.threads import StartedThreads
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.images import PromptImage
from baton.wire.media import Medium

_MAX_INLINE_CHARS = 4096
_MAX_SIDE_BY_SIDE_CHARS = 2**17
_TIMEOUT_S = 10.0
_USUAL_ROOM = 2048
"""Tokens of an answer where nothing is known that bounds it."""
_NUM_LAST_TOKENS = 32
"""So many tokens of a prompt tell whether the answer begins with reasoning."""
_AUTO, _PLAIN = ParserNames(), AnswerFormat()
ResultT = TypeVar("ResultT")


class ChatPrompt(NamedTuple):
    """A conversation as a model gets it. `media`: those among the tokens, with payload."""

    token_ids: Sequence[int]
    media: Sequence[Medium] = ()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Turns requests into token ids with one checkpoint's tokenizer and chat template. `request_templates` renders the
    templates that requests bring along; None refuses them. `images`: reads those of requests; None refuses them.
    `thinks_unless_told`, `thinking_switches`: see `ChatTemplate`. `start` and `close` go around its use."""

    tokenizer: Tokenizer
    template: ChatTemplate
    grammars: GrammarChecks
    request_templates: RequestTemplates | None = None
    answer_format: AnswerFormat = _PLAIN
    images: Images | None = None
    thinks_unless_told: bool = False
    thinking_switches: tuple[str, ...] = ()
    very_long: StartedThreads = field(default_factory=lambda: StartedThreads(1, "very long prompts"))

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        request_templates: RequestTemplates | None = None,
        parsers: ParserNames = _AUTO,
        images: Images | None = None,
    ) -> PromptMaker:
        """Raises `ModelLoadError` when the checkpoint has no usable tokenizer."""
        tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
        answer_format = parsers.format_of(template.text)
        return cls(
            tokenizer,
            template,
            GrammarChecks(folder),
            request_templates,
            answer_format,
            images,
            template.thinks_unless_told(),
            template.thinking_switches(),
        )

    def start(self) -> None:
        """Start every thread that a request may need."""
        for each in (self.very_long, self.grammars, self.images):
            if each is not None:
                each.start()

    def close(self) -> None:
        """End the threads, and the processes that were started to check grammars and to read images."""
        self.very_long.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()
        if self.images is not None:
            self.images.close()

    @property
    def media_kinds(self) -> Sequence[str]:
        """The kinds of media that requests may have, where nodes compute them."""
        return [PromptImage.kind] if self.images is not None and self.images.limit > 0 else []

    async def grammar(
        self, request: GenerationRequest, prompt_ids: Sequence[int], limits: Sequence[int]
    ) -> Grammar | None:
        """The grammar of the answer to a prompt, None without one. `limits`: of its tokens, as far as any are known.
        Raises `InvalidRequest` when it cannot be compiled."""
        asked, shape = request.asked_grammar, None
        if isinstance(request, ChatCompletionRequest):
            shape = self._shape(request, prompt_ids, max(1, min(limits, default=_USUAL_ROOM)))
        if shape is not None:
            asked = whole_grammar(shape, request, self.tokenizer.added_token_id)
        if asked is None:
            return None
        grammar, param = asked
        parts = request.grammar_parts() if isinstance(request, ChatCompletionRequest) else ()
        await self.grammars.require(grammar, param, parts)
        return grammar

    def _shape(
        self, request: ChatCompletionRequest, prompt_ids: Sequence[int], room: int = _USUAL_ROOM
    ) -> AnswerShape | HarmonyShape | None:
        is_usual = self.thinks_unless_told and request.chat_template is None
        reasoning = Reasoning(self._is_reasoning_begun(prompt_ids), is_usual, room)
        return shape_of(request, self.answer_format, reasoning)

    def note_ignored(self, request: ChatCompletionRequest, notes: IgnoredFields) -> None:
        """Note what cannot be done with this model. Raises `InvalidRequest` when the router is strict."""
        note_unenforced(request, self.answer_format, notes)
        note_unshown(request, request.chat_template or self.template.text, notes)

    def _is_reasoning_begun(self, prompt_ids: Sequence[int]) -> bool:
        if not self.answer_format.has_reasoning:
            return False
        end = self.tokenizer.decode(prompt_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return self.answer_format.begins_reasoning(end)

    async def chat_prompt(self, request: ChatCompletionRequest) -> ChatPrompt:
        """Token ids of the conversation, and its media. Raises `InvalidRequest` when the template refuses it, and for
        images that cannot be served; `Overloaded` when there is no room for them."""
        texts = request.images
        read = await self._images(texts, request.images_field) if texts else []
        arguments: dict[str, Any] = {
            "messages": request.template_messages(),
            "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
            "continue_final_message": request.continue_final_message,
            **request.template_variables(),
        }
        rendered = None
        if request.chat_template is not None:
            if self.request_templates is None:
                message = "chat_template is not allowed: the router runs without --trust-request-chat-template"
                raise InvalidRequest(message, "chat_template", UNSUPPORTED)
            special_tokens = self.template.special_tokens
            rendered = await self.request_templates.render(request.chat_template, special_tokens, arguments)

        def make() -> list[int]:
            text = self.template.render(**arguments) if rendered is None else rendered
            return self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)

        ids = _not_empty(await self.off_loop(make, max(request.num_chars, len(rendered or ""))), "messages")
        if not read or self.images is None:
            return ChatPrompt(ids)
        return ChatPrompt(*await asyncio.to_thread(self.images.placed, ids, read, request.images_field))

    async def _images(self, texts: Sequence[str], param: str) -> list[ReadImage]:
        if self.images is None:
            raise refused_images(param, "images are not served here", UNSUPPORTED)
        return await self.images.read(texts, param)

    def answer_parts(
        self, request: ChatCompletionRequest, prompt_ids: Sequence[int], id_of: Callable[[str], str]
    ) -> AnswerParts | None:
        """What tells content, reasoning and calls of the answer apart; None: there is content only. `id_of`: see
        `ReplyHead`."""
        if not self._has_parts(request):
            return None
        return AnswerParts(self._parser_maker(request, prompt_ids), id_of, shows_reasoning=request.include_reasoning)

    def choice_parts(self, request: ChatCompletionRequest, prompt_ids: Sequence[int]) -> ChoiceParts:
        """The parts of an answer with one choice. Where there is content only, that is all it finds."""
        if not self._has_parts(request):
            return ChoiceParts(_PLAIN.parser(CallsWanted(), is_reasoning_begun=False))
        return ChoiceParts(self._parser_maker(request, prompt_ids)())

    def _parser_maker(self, request: ChatCompletionRequest, prompt_ids: Sequence[int]) -> Callable[[], AnswerParser]:
        is_begun = self._is_reasoning_begun(prompt_ids)
        shape = self._shape(request, prompt_ids)
        may_reason = request.asked_grammar is None or (shape is not None and shape.may_reason)
        wanted = replace(request.calls_wanted, may_reason=may_reason)
        return lambda: self.answer_format.parser(wanted, is_reasoning_begun=is_begun)

    def text_options(self, request: GenerationRequest) -> TextOptions:
        """The options for the text of a choice. Where it is told apart, the markers of its parts have text."""
        options = request.text_options()
        if not isinstance(request, ChatCompletionRequest) or not self._has_parts(request):
            return options
        ids = (self.tokenizer.added_token_id(marker) for marker in MARKERS)
        return replace(options, shown_special_ids=frozenset(found for found in ids if found is not None))

    def _has_parts(self, request: ChatCompletionRequest) -> bool:
        return self.answer_format.has_reasoning or bool(request.offered_tools)

    async def completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises `InvalidRequest` for ids outside the vocabulary."""
        request.check_vocabulary(self.tokenizer.vocab_size)
        suffix = request.suffix or ""
        middle = self._fill_in_middle() if suffix else None
        size = sum(len(prompt) + len(suffix) for prompt in request.prompt)

        def encode(text: str) -> list[int]:
            if middle is not None:
                return middle.prompt(self.tokenizer, text, suffix)
            return self.tokenizer.encode(text, request.add_special_tokens)

        def make() -> list[list[int]]:
            return [encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompt]

        return [_not_empty(ids, "prompt") for ids in await self.off_loop(make, size)]

    def with_end_of_middle(self, request: CompletionRequest) -> CompletionRequest:
        """The request, ended also by the token with which the model ends a text before a suffix, if it has one."""
        middle = FillInMiddle.find(self.tokenizer) if request.suffix else None
        if middle is None or not middle.stop_ids:
            return request
        return request.model_copy(update={"stop_token_ids": (*request.stop_token_ids, *middle.stop_ids)})

    async def off_loop(self, make: Callable[[], ResultT], size: int) -> ResultT:
        """Run `make`: on the event loop for short texts, in a thread for long ones, which would delay all other
        streams. Very long ones have one thread: each takes a hundred times its size, which goes back to the system
        afterwards."""
        if size <= _MAX_INLINE_CHARS:
            return make()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                if size <= _MAX_SIDE_BY_SIDE_CHARS:
                    return await loop.run_in_executor(None, make)
                return await loop.run_in_executor(self.very_long, _and_return_memory, make)
        except TimeoutError:
            raise InvalidRequest(f"preparing the prompt took longer than {_TIMEOUT_S:g} s") from None

    def _fill_in_middle(self) -> FillInMiddle:
        found = FillInMiddle.find(self.tokenizer)
        if found is None:
            message = "suffix is not supported: this model's tokenizer has no fill-in-the-middle tokens"
            raise InvalidRequest(message, "suffix", UNSUPPORTED)
        return found

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

        return await self.off_loop(make, sum(map(len, prompts)))

    def bad_word_ids(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """The token sequences by which a model would write what the answer may not hold: each word at the beginning of
        a text, and behind a space. With `tool_choice` none that is also what begins a call: earlier turns of the
        conversation show the model how."""
        found: dict[tuple[int, ...], None] = {}
        may_not_call = isinstance(request, ChatCompletionRequest) and request.tools and not request.offered_tools
        for word in (*request.bad_words, *(self.answer_format.call_begins if may_not_call else ())):
            bare = word.lstrip()
            for text in (bare, " " + bare):
                if ids := self.tokenizer.encode(text, add_special_tokens=False):
                    found[tuple(ids)] = None
        return tuple(found)

    async def prediction_ids(self, request: GenerationRequest, at_most: int) -> tuple[int, ...]:
        """The first tokens of the text that the answer may be like."""
        text = "" if request.prediction is None else request.prediction.content
        if not text:
            return ()
        ids = await self.off_loop(lambda: self.tokenizer.encode(text, add_special_tokens=False), len(text))
        return tuple(ids[:at_most])


def _and_return_memory(make: Callable[[], ResultT]) -> ResultT:
    try:
        return make()
    finally:
        return_freed_memory()


def truncated(request: GenerationRequest, prompt_ids: Sequence[int], max_model_len: int | None) -> Sequence[int]:
    """The part of a prompt that `truncate_prompt_tokens` asks for; -1: as much as leaves room for the output."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None or (num_kept < 0 and max_model_len is None):
        return prompt_ids
    if num_kept < 0 and max_model_len is not None:
        num_kept = max(1, max_model_len - (request.output_limit[1] or 1))
    return prompt_ids[-num_kept:] if request.truncation_side == "left" else prompt_ids[:num_kept]


def _not_empty(token_ids: list[int], param: str) -> list[int]:
    if not token_ids:
        raise InvalidRequest(f"{param} holds no tokens", param)
    return token_ids
