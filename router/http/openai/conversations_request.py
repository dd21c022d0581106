"""The bodies of requests to `/v1/conversations`. Items have the form of an input of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, WithJsonSchema

from baton.router.http.openai.fields import TOO_LONG, Metadata, field_error
from baton.router.http.openai.responses_input import INPUT_ITEMS, Conversation, read_input
from baton.router.http.openai.strict_model import Strict


def _read_items(value: Any) -> Conversation:
    if not isinstance(value, list):
        raise field_error("must be a list of items")
    if not value:
        return Conversation((), ())
    found = read_input(value)
    if found.fault:
        raise field_error(found.fault, (), TOO_LONG)
    return found


def _read_some_items(value: Any) -> Conversation:
    found = _read_items(value)
    if not found.items:
        raise field_error("must be a non-empty list of items")
    return found


class ConversationUpdate(Strict):
    """The body of `POST /v1/conversations/{conversation_id}`: `metadata` in place of what the conversation has."""

    refuses_unknown: ClassVar[bool] = True

    metadata: Metadata | None = None


class ConversationCreate(ConversationUpdate):
    """The body of `POST /v1/conversations`."""

    items: (
        Annotated[Conversation, PlainValidator(_read_items), WithJsonSchema({**INPUT_ITEMS, "minItems": 0})] | None
    ) = None


class ConversationItemsCreate(Strict):
    """The body of `POST /v1/conversations/{conversation_id}/items`."""

    refuses_unknown: ClassVar[bool] = True

    items: Annotated[Conversation, PlainValidator(_read_some_items), WithJsonSchema(INPUT_ITEMS)]
