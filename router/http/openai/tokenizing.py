"""`POST /tokenize` and `POST /detokenize`, with vLLM's members.

A conversation is rendered with the chat template exactly as the chat endpoint does, so its `count` is what that prompt
would cost. Long texts are handled in a thread, their answers included. Asks no node for anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from aiohttp import web
from pydantic import FailFast, Field, PlainValidator, model_validator

from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.openai.endpoints import Endpoints
from baton.router.http.openai.fields import MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, field_error
from baton.router.http.openai.messages import Message
from baton.router.http.openai.replies import json_bytes
from baton.router.http.openai.request_body import read_request
from baton.router.http.openai.schemas import MAX_MESSAGES, MAX_MODEL_NAME, ChatCompletionRequest
from baton.router.http.openai.strict_json import extremes, holds_only_integers
from baton.router.http.openai.strict_model import Strict
from baton.router.http.served_model import ServedModel
from baton.wire.errors import InvalidRequest

_ADDS_SPECIAL = "add_special_tokens"
_ModelName = Annotated[str, Field(max_length=MAX_MODEL_NAME)]


def _read_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not holds_only_integers(value):
        raise field_error("must be a list of token ids")
    if len(value) > MAX_PROMPT_TOKENS:
        raise field_error(f"holds more than {MAX_PROMPT_TOKENS} token ids")
    return tuple(value)


class TokenizeRequest(ChatCompletionRequest):
    """The body of `POST /tokenize`: a `prompt`, or `messages` with the other members of a chat request that change its
    prompt. `model` may be left out."""

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        name: neutral for name, neutral in ChatCompletionRequest.unsupported.items() if name != "prompt"
    }
    refuses_unknown: ClassVar[bool] = True

    model: _ModelName = ""
    prompt: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None
    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise field_error("is required, or messages instead of it, and not both", ("prompt",))
        return self

    @property
    def adds_special(self) -> bool:
        """Whether the tokenizer adds special tokens. Templates write their own, so messages have to ask for them."""
        return self.add_special_tokens if _ADDS_SPECIAL in self.model_fields_set else self.prompt is not None


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`. `model` may be left out."""

    refuses_unknown: ClassVar[bool] = True

    model: _ModelName = ""
    tokens: Annotated[tuple[int, ...], PlainValidator(_read_tokens)]


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """The two handlers. A request that names no model means the first one that is served."""

    endpoints: Endpoints

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)

    async def tokenize(self, http: web.Request) -> web.Response:
        """`POST /tokenize`: the token ids of a text or a conversation."""
        request = await read_request(http, TokenizeRequest)
        model = self._model(request.model)
        text, chat_ids = request.prompt, None
        if text is None:
            chat_ids = (await model.prompts.chat_prompt(request)).token_ids
        adds_special = request.adds_special
        limit, tokenizer = self.endpoints.max_model_len(model.name), model.prompts.tokenizer

        def make() -> bytes:
            ids = tokenizer.encode(text, adds_special) if text is not None else chat_ids or []
            strs = [tokenizer.vocabulary_piece(i) or "" for i in ids] if request.return_token_strs else None
            return json_bytes({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strs})

        return _json(await model.prompts.off_loop(make, len(chat_ids or text or "")))

    async def detokenize(self, http: web.Request) -> web.Response:
        """`POST /detokenize`: the text of token ids, special tokens included."""
        request = await read_request(http, DetokenizeRequest)
        tokenizer, ids = self._model(request.model).prompts.tokenizer, request.tokens

        def make() -> bytes:
            _check_vocabulary(ids, tokenizer)
            return json_bytes({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

        return _json(await self._model(request.model).prompts.off_loop(make, len(ids)))

    def _model(self, name: str) -> ServedModel:
        return self.endpoints.model_named(name) if name else next(iter(self.endpoints.served.values()))


def _check_vocabulary(ids: tuple[int, ...], tokenizer: Tokenizer) -> None:
    smallest, largest = extremes(ids) if ids else (0, 0)
    if smallest < 0 or largest >= tokenizer.vocab_size:
        raise InvalidRequest(f"tokens: ids must lie in the vocabulary of {tokenizer.vocab_size}", "tokens")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
