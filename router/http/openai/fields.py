"""Types of single request fields that need more than a Python type: what is accepted, and its normal form.

Owns the shapes that OpenAI allows for one field (a string or a list of strings, four kinds of prompt, ...) and the
limits that keep one field from costing more than its body did. Does not know which request a field belongs to: a
`field_error` tells where inside the field the fault is, and the schema adds the path to the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from baton.engine.text.chat_template import ALLOWED_VARIABLES
from baton.router.http.openai.ignored import IMAGE_URL, STRICT, TEXT_PART, UNKNOWN, IgnoredFields, IgnoredTable
from baton.router.http.openai.image_parts import DATA_URL, ImagePart, joined, of_url
from baton.router.http.openai.strict_json import extremes, holds_only_integers, shown
from baton.wire.sampling import (
    MAX_ABS_LOGIT_BIAS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_TEXT_CHARS = 1_048_576
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 2**20
MAX_TOKEN_ID = 2**32 - 1
MAX_USER_CHARS = 512
MAX_DOCUMENTS = 1024
MAX_BAD_WORD_CHARS = 128
MAX_METADATA_ITEMS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_TEMPLATE_VALUE_CHARS = 1024

FIELD_ERROR = "field_error"
"""pydantic's name for the errors made here: their text continues the name of the field."""

UNSUPPORTED, TOO_LONG = "unsupported_parameter", "string_above_max_length"
REFUSED = {UNKNOWN: "is not a parameter of this endpoint", STRICT: "changes nothing, and this router is strict"}
"""How an error about a field continues, by its code, when `IgnoredFields` refuses the field."""

# tools and documents are no text-only conversation, so their variables stay out of reach
_TEMPLATE_VARIABLES = ALLOWED_VARIABLES - {
    "builtin_tools",
    "custom_tools",
    "documents",
    "tool_choice",
    "tools",
    "tools_in_user_message",
}
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


def field_error(sentence: str, path: tuple[str | int, ...] = (), code: str = "invalid_value") -> PydanticCustomError:
    """An error at `path` below the field that is being validated; `sentence` continues the field's name."""
    return PydanticCustomError(FIELD_ERROR, "{sentence}", {"sentence": sentence, "path": path, "code": code})


def ignored_fields_of(info: ValidationInfo) -> IgnoredFields:
    """The notes of the request that is being validated: `context` of the validation, or else a new object."""
    return info.context if isinstance(info.context, IgnoredFields) else IgnoredFields()


def refuse_or_ignore(
    notes: IgnoredFields, name: str, value: Any, table: IgnoredTable, place: str, path: tuple[str | int, ...]
) -> None:
    """Note a member that changes nothing; see `IgnoredFields.ignore`. Raises a `field_error` at `path` instead when it
    has to be refused."""
    code = notes.ignore(name, value, table, place)
    if code is not None:
        raise field_error(REFUSED[code], path, code)


def read_content(value: Any, info: ValidationInfo) -> str:
    """The text of a message: a string, or the texts of a list of parts, joined with newlines; with images a
    `SeenText`."""
    if isinstance(value, str):
        return _checked_text(value)
    if not isinstance(value, list) or not value:
        raise field_error("must be a string or a non-empty list of parts")
    notes = ignored_fields_of(info)
    return _checked_text(joined([_part(part, index, notes) for index, part in enumerate(value)]))


def _part(part: Any, index: int, notes: IgnoredFields) -> str | ImagePart:
    if not isinstance(part, dict):
        raise field_error("must be an object", (index,))
    kind, text = part.get("type"), part.get("text")
    if not isinstance(kind, str):
        raise field_error("must be a string", (index, "type"))
    if kind == "image_url":
        return _image(part, index, notes)
    if kind != "text":
        sentence = f"{shown(kind)} is unsupported: content may hold text and image_url"
        raise field_error(sentence, (index, "type"), UNSUPPORTED)
    if not isinstance(text, str):
        raise field_error("must be a string", (index, "text"))
    for name, member in part.items() if len(part) > 2 else ():
        if name not in ("type", "text"):
            refuse_or_ignore(notes, name, member, TEXT_PART, "messages[].content[]", (index, name))
    return text


def _image(part: Any, index: int, notes: IgnoredFields) -> ImagePart:
    for name, member in part.items():
        if name not in ("type", "image_url"):
            refuse_or_ignore(notes, name, member, TEXT_PART, "messages[].content[]", (index, name))
    image = part.get("image_url")
    if not isinstance(image, dict):
        raise field_error("must be an object", (index, "image_url"))
    path = (index, "image_url")
    for name, member in image.items():
        if name != "url":
            refuse_or_ignore(notes, name, member, IMAGE_URL, "messages[].content[].image_url", (*path, name))
    try:
        return of_url(image.get("url"))
    except ValueError as error:
        raise field_error(str(error), (*path, "url")) from None


def _checked_text(text: str, path: tuple[str | int, ...] = ()) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise field_error(f"is longer than {MAX_TEXT_CHARS} characters", path, TOO_LONG)
    return text


def _read_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (_checked_prompt(value, ()),)
    if not isinstance(value, list) or not value:
        raise field_error("must be a non-empty string, or a non-empty list of strings, token ids or lists of token ids")
    if isinstance(value[0], int) and holds_only_integers(value):
        return (_checked_prompt(value, ()),)
    if len(value) > MAX_PROMPTS:
        raise field_error(f"holds more than {MAX_PROMPTS} prompts")
    if not all(isinstance(item, str) for item in value) and not all(isinstance(item, list) for item in value):
        raise field_error("must hold either strings, or token ids, or lists of token ids")
    return tuple(_checked_prompt(item, (index,)) for index, item in enumerate(value))


def _checked_prompt(prompt: str | list[int], path: tuple[int, ...]) -> str | tuple[int, ...]:
    if not prompt:
        raise field_error("must not be empty", path)
    if isinstance(prompt, str):
        return _checked_text(prompt, path)
    if len(prompt) > MAX_PROMPT_TOKENS:
        raise field_error(f"holds more than {MAX_PROMPT_TOKENS} token ids", path)
    smallest, largest = extremes(prompt) if holds_only_integers(prompt) else (-1, -1)
    if smallest < 0 or largest > MAX_TOKEN_ID:
        raise field_error("must hold token ids: integers of at least 0", path)
    return tuple(prompt)


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise field_error("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise field_error(f"allows at most {MAX_STOP_STRINGS} strings, got {len(stops)}")
    return tuple(stops)


def _read_token_ids(value: Any, max_items: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise field_error("must be a list of token ids")
    if len(value) > max_items:
        raise field_error(f"allows at most {max_items} entries, got {len(value)}")
    return tuple(value)


def _read_stop_token_ids(value: Any) -> tuple[int, ...]:
    return _read_token_ids(value, MAX_STOP_TOKEN_IDS)


def _read_allowed_tokens(value: Any) -> tuple[int, ...]:
    token_ids = _read_token_ids(value, MAX_ALLOWED_TOKEN_IDS)
    if not token_ids:
        raise field_error("must not be empty: no token could be sampled")
    return token_ids


def _read_bad_words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise field_error("must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise field_error(f"allows at most {MAX_BAD_WORDS} words, got {len(value)}")
    for index, word in enumerate(value):
        if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
            raise field_error(f"must be a string of 1 to {MAX_BAD_WORD_CHARS} characters", (index,))
    return tuple(value)


def _read_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise field_error("must be an object from token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise field_error(f"allows at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    for key, bias in value.items():
        if _DECIMAL.fullmatch(key) is None:
            raise field_error(f"needs token ids as keys, got {shown(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise field_error("must be a number", (key,))
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _read_metadata(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA_ITEMS:
        raise field_error(f"must be an object of at most {MAX_METADATA_ITEMS} members")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY or not isinstance(text, str) or len(text) > MAX_METADATA_VALUE:
            raise field_error(
                f"needs keys of at most {MAX_METADATA_KEY} and strings of at most {MAX_METADATA_VALUE} characters"
            )
    return value


def _read_template_variables(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise field_error("must be an object")
    for name, member in value.items():
        if name not in _TEMPLATE_VARIABLES:
            allowed = ", ".join(sorted(_TEMPLATE_VARIABLES))
            raise field_error(f"may not be set by a request; allowed are {allowed}", (name,), UNSUPPORTED)
        if isinstance(member, dict | list) or (isinstance(member, str) and len(member) > MAX_TEMPLATE_VALUE_CHARS):
            limit = MAX_TEMPLATE_VALUE_CHARS
            raise field_error(f"must be a number, a boolean or a string of at most {limit} characters", (name,))
    return value


def _read_documents(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or len(value) > MAX_DOCUMENTS:
        raise field_error(f"must be a list of at most {MAX_DOCUMENTS} documents")
    for index, document in enumerate(value):
        if not isinstance(document, dict) or not all(isinstance(text, str) for text in document.values()):
            raise field_error("must be an object whose members are strings", (index,))
    if sum(len(text) for document in value for text in document.values()) > MAX_TEXT_CHARS:
        raise field_error(f"hold more than {MAX_TEXT_CHARS} characters together", (), TOO_LONG)
    return tuple(value)


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_PROMPT_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
}
_PROMPT = {**_TEXT, "minLength": 1}

_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string", "pattern": DATA_URL}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}, "minItems": 1}
Content = Annotated[str, PlainValidator(read_content), WithJsonSchema({"anyOf": [_TEXT, _PARTS]})]
"""A message's text; text parts are joined. With images it is a `SeenText`."""

Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    PlainValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _PROMPT,
                _PROMPT_IDS,
                {"type": "array", "items": _PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": _PROMPT_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
"""One or more prompts, each a text or token ids."""

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_read_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}),
]
TokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_read_stop_token_ids),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
            "maxItems": MAX_STOP_TOKEN_IDS,
        }
    ),
]
AllowedTokens = Annotated[
    tuple[int, ...],
    PlainValidator(_read_allowed_tokens),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
            "minItems": 1,
            "maxItems": MAX_ALLOWED_TOKEN_IDS,
        }
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_read_bad_words),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS},
            "maxItems": MAX_BAD_WORDS,
        }
    ),
]

LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_read_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -MAX_ABS_LOGIT_BIAS,
                "maximum": MAX_ABS_LOGIT_BIAS,
            },
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
"""(token id, bias) pairs. An id is written as a plain decimal number, so two keys are never one id."""

Documents = Annotated[
    tuple[Mapping[str, str], ...],
    PlainValidator(_read_documents),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "object", "additionalProperties": {"type": "string"}},
            "maxItems": MAX_DOCUMENTS,
        }
    ),
]
"""Documents for a chat template that knows how to show them."""

CacheSalt = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, Field(ge=-1, lt=2**31)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
UserName = Annotated[str, Field(max_length=MAX_USER_CHARS)]
Metadata = Annotated[
    Mapping[str, str],
    PlainValidator(_read_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
            "maxProperties": MAX_METADATA_ITEMS,
        }
    ),
]

TemplateVariables = Annotated[
    Mapping[str, Any],
    PlainValidator(_read_template_variables),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"enum": sorted(_TEMPLATE_VARIABLES)},
            "additionalProperties": {
                "anyOf": [
                    {"type": ["number", "boolean", "null"]},
                    {"type": "string", "maxLength": MAX_TEMPLATE_VALUE_CHARS},
                ]
            },
        }
    ),
]
"""Scalars for the variables of the chat template that a request may set."""
