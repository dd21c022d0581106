"""The field `prediction`: what the client expects its answer to be like, such as the file that is to be edited.

Owns the shape. Tokens of it are drafts at the node that generates, so it changes when tokens come, and not which. That
is why nothing is refused for what else a request asks for, where OpenAI refuses several choices, tools and others.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, WithJsonSchema

from baton.router.http.openai.fields import MAX_TEXT_CHARS, field_error
from baton.router.http.openai.strict_model import Strict


def _read_content(value: Any) -> str:
    """The text, of which no more is kept than a prompt may have: an answer is no longer."""
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    if not isinstance(value, list) or not value:
        raise field_error("must be a string or a non-empty list of parts")
    return "".join(_text_of(part, index) for index, part in enumerate(value))[:MAX_TEXT_CHARS]


def _text_of(part: Any, index: int) -> str:
    if not isinstance(part, dict):
        raise field_error("must be an object", (index,))
    if part.get("type") != "text":
        raise field_error("must be 'text'", (index, "type"))
    text = part.get("text")
    if not isinstance(text, str):
        raise field_error("must be a string", (index, "text"))
    return text


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_Content = Annotated[
    str,
    PlainValidator(_read_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}),
]


class Prediction(Strict):
    """`{"type": "content", "content": ...}`. Its content is a text; the texts of parts follow one another."""

    place: ClassVar[str] = "prediction"

    type: Literal["content"]
    content: _Content
