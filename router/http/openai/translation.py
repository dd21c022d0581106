"""What an interface other than OpenAI's chat has to bring along: a translation of its requests into those of chat, and
a writer of answers in its own words. Everything between the two is the same for all of them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from baton.engine.text.choice_text import TextDelta
from baton.router.http.openai.replies import ReplyStream
from baton.router.http.openai.schemas import ChatCompletionRequest
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.usage import Usage


class TranslatedRequest(Strict):
    """The body of a request for one answer. `conversation_field`: what an error about the whole prompt names."""

    model: str
    conversation_field: ClassVar[str]

    def as_chat(self) -> ChatCompletionRequest:
        """The same request for /v1/chat/completions. Errors about it name the fields of this one."""
        raise NotImplementedError


class AnswerWriter(ReplyStream, Protocol):
    """Writes one answer, in events or as a whole."""

    async def whole(self, piece: TextDelta, usage: Usage) -> dict[str, Any]:
        """The answer, of which `piece` is all text, for `json_pieces`."""
        ...
