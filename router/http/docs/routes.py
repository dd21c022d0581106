"""What /openapi.json says about each route beyond its path: a line, the schema of its body, the name of its answer.

A route of the application that has no row here is listed all the same, with the first sentence of its handler's
docstring. A row for a route that is not there is ignored, so that a route behind a flag may have one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from baton.router.http.access.guard import (
    CONVERSATION_ITEM_ROUTE,
    CONVERSATION_ITEMS_ROUTE,
    CONVERSATION_ROUTE,
    ITEMS_ROUTE,
    RESPONSE_ROUTE,
)
from baton.router.http.anthropic.request import CountTokensRequest, MessagesRequest
from baton.router.http.openai.conversations_request import (
    ConversationCreate,
    ConversationItemsCreate,
    ConversationUpdate,
)
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest
from baton.router.http.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from baton.router.http.operators.admin import DrainRequest, PreferRequest

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """`answer` and `error` name schemas of `baton.router.http.docs.answers`; "": there is no answer. `media_type`: ""
    where the answer is empty. `streams`: it may be events. `statuses`: of errors, beyond those that every route may
    answer with.
    """

    summary: str
    request: type[BaseModel] | None = None
    answer: str = ""
    streams: bool = False
    media_type: str = JSON
    statuses: tuple[int, ...] = ()
    error: str = "Error"


_TEXT = (400, 404, 413, 415)
_GENERATION = (400, 404, 413, 415, 502, 503, 504)
_STORED = (400, 404, 503)
_WRITTEN = (400, 404, 413, 415, 503)
ROUTES: dict[tuple[str, str], RouteDoc] = {
    ("POST", "/v1/chat/completions"): RouteDoc(
        "Answer a conversation", ChatCompletionRequest, "ChatCompletion", streams=True, statuses=_GENERATION
    ),
    ("POST", "/v1/completions"): RouteDoc(
        "Continue texts", CompletionRequest, "Completion", streams=True, statuses=_GENERATION
    ),
    ("POST", "/v1/responses"): RouteDoc(
        "Answer a conversation, in the format of the Responses API", ResponsesRequest, "Response", streams=True,
        statuses=_GENERATION,
    ),
    ("GET", RESPONSE_ROUTE): RouteDoc("A stored response", answer="Response", statuses=_STORED),
    ("DELETE", RESPONSE_ROUTE): RouteDoc("Delete a stored response", answer="DeletedResponse", statuses=_STORED),
    ("GET", ITEMS_ROUTE): RouteDoc(
        "The items that a stored response was the answer to", answer="ResponseItems", statuses=_STORED
    ),
    ("POST", "/v1/conversations"): RouteDoc(
        "Begin a conversation that is stored", ConversationCreate, "Conversation", statuses=_WRITTEN
    ),
    ("GET", CONVERSATION_ROUTE): RouteDoc("A conversation", answer="Conversation", statuses=_STORED),
    ("POST", CONVERSATION_ROUTE): RouteDoc(
        "Give a conversation other metadata", ConversationUpdate, "Conversation", statuses=_WRITTEN
    ),
    ("DELETE", CONVERSATION_ROUTE): RouteDoc(
        "Delete a conversation with all that belongs to it", answer="DeletedConversation", statuses=_STORED
    ),
    ("GET", CONVERSATION_ITEMS_ROUTE): RouteDoc(
        "The items of a conversation", answer="ResponseItems", statuses=_STORED
    ),
    ("POST", CONVERSATION_ITEMS_ROUTE): RouteDoc(
        "Add items to a conversation", ConversationItemsCreate, "ResponseItems", statuses=_WRITTEN
    ),
    ("GET", CONVERSATION_ITEM_ROUTE): RouteDoc("One item", answer="ResponseItem", statuses=_STORED),
    ("DELETE", CONVERSATION_ITEM_ROUTE): RouteDoc("Delete one item", answer="Conversation", statuses=_STORED),
    ("GET", "/v1/streams/{event_id}"): RouteDoc(
        "What a stream tells after one of its events", media_type=EVENTS, statuses=_GENERATION
    ),
    ("POST", "/v1/messages"): RouteDoc(
        "Answer a conversation, in Anthropic's format", MessagesRequest, "AnthropicMessage", streams=True,
        statuses=_GENERATION, error="AnthropicError",
    ),
    ("POST", "/v1/messages/count_tokens"): RouteDoc(
        "Count the tokens of a conversation, in Anthropic's format", CountTokensRequest, "AnthropicTokenCount",
        statuses=_TEXT, error="AnthropicError",
    ),
    ("GET", "/v1/models"): RouteDoc("List the models", answer="ModelList"),
    ("GET", "/v1/models/{name}"): RouteDoc("Describe one model", answer="Model", statuses=(404,)),
    ("GET", "/ping"): RouteDoc("Whether the process answers, as SageMaker asks", media_type=""),
    ("POST", "/ping"): RouteDoc("Whether the process answers, as SageMaker asks", media_type=""),
    ("GET", "/health"): RouteDoc("Whether requests can be served now", answer="Health", statuses=(503,)),
    ("GET", "/metrics"): RouteDoc("Metrics for Prometheus", media_type=TEXT),
    ("POST", "/tokenize"): RouteDoc(
        "The token ids of a text or a conversation", TokenizeRequest, statuses=_TEXT
    ),
    ("POST", "/detokenize"): RouteDoc("The text of token ids", DetokenizeRequest, statuses=_TEXT),
    ("POST", "/admin/drain"): RouteDoc(
        "Take a node out of service: others go on with what it generates", DrainRequest, statuses=(400, 403, 404, 415)
    ),
    ("POST", "/admin/prefer"): RouteDoc(
        "Give a mixed node other legs from now on", PreferRequest, statuses=(400, 403, 404, 415)
    ),
    ("GET", "/"): RouteDoc("A page to chat, and to look at the relay", media_type=HTML),
    ("GET", "/page/files/{name}"): RouteDoc("A script or a picture of the page", media_type=TEXT, statuses=(404,)),
    ("GET", "/page/events"): RouteDoc("What the page shows of the relay", media_type=EVENTS, statuses=(503,)),
    ("GET", "/openapi.json"): RouteDoc("This document"),
    ("GET", "/docs"): RouteDoc("This document as a page", media_type=HTML),
}  # fmt: skip
"""(method, path) -> row. One line here documents a route."""
