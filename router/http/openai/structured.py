"""The fields by which a request asks for an answer of a given structure, and the one grammar that they come down to.

Owns the names and shapes: OpenAI's `response_format` (and `text.format` of /v1/responses), vLLM's `structured_outputs`,
and the older `guided_*`. Whether the grammar can be compiled is found out later (`grammar_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from baton.router.http.openai.fields import TOO_LONG, UNSUPPORTED, field_error
from baton.router.http.openai.strict_json import shown
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import MAX_GRAMMAR_CHARS, Grammar

MAX_CHOICES = 4096
_SCHEMA_SETTINGS = ("name", "description", "schema", "strict")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "structural_tag": (),
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
}
_GUIDED_WHITESPACE = "guided_whitespace_pattern"
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the place of its text below the field that it came with."""

    grammar: Grammar
    path: tuple[str, ...] = ()

    def param(self, field: str) -> str:
        """What an error about the text names."""
        return ".".join((field, *self.path))


def read_response_format(value: Any, at: tuple[str, ...] = ()) -> AskedGrammar | None:
    """`{"type": "text" | "json_object" | "json_schema", ...}`, which is at this path below its field; None for text."""
    kind = _object(value, at).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedGrammar(Grammar.json_object(), at)
    if kind != "json_schema":
        code = UNSUPPORTED if kind == "structural_tag" else "invalid_value"
        raise field_error("must be 'text', 'json_object' or 'json_schema'", (*at, "type"), code)
    return _named_schema(value.get("json_schema"), (*at, "json_schema"))


def read_text_format(value: Any, at: tuple[str, ...] = ()) -> AskedGrammar | None:
    """`text.format` of /v1/responses: like `response_format`, with the members of a schema beside its type."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return _named_schema({name: member for name, member in value.items() if name != "type"}, at)
    return read_response_format(value, at)


def _named_schema(value: Any, path: tuple[str, ...]) -> AskedGrammar:
    """`{"name", "schema", "strict", "description"}`; a schema that is not strict is enforced all the same."""
    members = _object(value, path)
    for name in members:
        if name not in _SCHEMA_SETTINGS:
            raise field_error("is not a member of a JSON schema format", (*path, name), "unknown_parameter")
    for name in ("name", "description"):
        if not isinstance(members.get(name, ""), str | None):
            raise field_error("must be a string", (*path, name))
    if not isinstance(members.get("strict", False), bool | None):
        raise field_error("must be true or false", (*path, "strict"))
    if not isinstance(members.get("schema"), dict):
        raise field_error("must be an object", (*path, "schema"))
    return AskedGrammar(_made((*path, "schema"), Grammar.json_schema, members["schema"]), (*path, "schema"))


def read_structured_outputs(value: Any) -> AskedGrammar:
    """vLLM's `{"json" | "regex" | "choice" | "grammar" | "json_object": ..., options}`."""
    members = {name: member for name, member in _object(value).items() if member is not None}
    for name, member in members.items():
        if name not in (*_KINDS, *_NEUTRAL, *_WHITESPACE):
            raise field_error("is not a member of structured_outputs", (name,), "unknown_parameter")
        if name in _NEUTRAL and member not in _NEUTRAL[name]:
            raise field_error("is not supported", (name,), UNSUPPORTED)
    kinds = [name for name in _KINDS if members.get(name) not in (None, False)]
    if len(kinds) != 1:
        raise field_error(f"must have exactly one of {', '.join(_KINDS)}")
    (kind,) = kinds
    whitespace = _whitespace(members)
    if kind == "json_object":
        if members[kind] is not True:
            raise field_error("must be true or false", (kind,))
        return AskedGrammar(_made((), Grammar.json_schema, {"type": "object"}, whitespace))
    read = {"json": _read_json, "regex": _read_regex, "choice": _read_choice, "grammar": _read_ebnf}[kind]
    return AskedGrammar(read(members[kind], whitespace, (kind,)), (kind,))


def _whitespace(members: Mapping[str, Any]) -> str | None:
    pattern, is_disabled = members.get("whitespace_pattern"), members.get("disable_any_whitespace", False)
    if not isinstance(is_disabled, bool):
        raise field_error("must be true or false", ("disable_any_whitespace",))
    if not isinstance(pattern, str | None):
        raise field_error("must be a string", ("whitespace_pattern",))
    return "" if is_disabled else pattern


def _read_json(value: Any, whitespace: str | None = None, path: tuple[str, ...] = ()) -> Grammar:
    """A schema, as an object or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise field_error("is not valid JSON", path) from None
    if not isinstance(value, dict):
        raise field_error("must be a JSON schema: an object, or a string that holds one", path)
    return _made(path, Grammar.json_schema, value, whitespace)


def _read_regex(value: Any, whitespace: str | None = None, path: tuple[str, ...] = ()) -> Grammar:
    return _made(path, Grammar.regex, _text(value, path))


def _read_ebnf(value: Any, whitespace: str | None = None, path: tuple[str, ...] = ()) -> Grammar:
    return _made(path, Grammar.ebnf, _text(value, path))


def _read_choice(value: Any, whitespace: str | None = None, path: tuple[str, ...] = ()) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(choice, str) and choice for choice in value):
        raise field_error("must be a list of strings that are not empty", path)
    if not 0 < len(value) <= MAX_CHOICES:
        raise field_error(f"must have 1 to {MAX_CHOICES} strings", path)
    return _made(path, Grammar.choice, value)


def _made(path: tuple[str, ...], make: Callable[..., Grammar], *arguments: Any) -> Grammar:
    """The grammar, its errors at `path`."""
    try:
        return make(*arguments)
    except InvalidRequest:
        raise field_error(f"is longer than {MAX_GRAMMAR_CHARS} characters", path, TOO_LONG) from None


def _text(value: Any, path: tuple[str, ...]) -> str:
    if not isinstance(value, str) or not value:
        raise field_error("must be a string that is not empty", path)
    return value


def _object(value: Any, path: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise field_error(f"must be an object, not {shown(value)}", path)
    return value


def _read_guided_json(value: Any, info: ValidationInfo) -> AskedGrammar:
    return AskedGrammar(_read_json(value, info.data.get(_GUIDED_WHITESPACE)))


def _guided(read: Callable[[Any], Grammar]) -> Callable[[Any], AskedGrammar]:
    return lambda value: AskedGrammar(read(value))


_JSON_SCHEMA = {"type": "object"}
_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARS}
_STRING_OR_SCHEMA = {"anyOf": [_JSON_SCHEMA, _STRING]}
_CHOICES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES}
_NAMED = {
    "name": {"type": "string"},
    "description": {"type": ["string", "null"]},
    "schema": _JSON_SCHEMA,
    "strict": {"type": ["boolean", "null"]},
}
_PLAIN_FORMATS = [
    {"type": "object", "properties": {"type": {"const": kind}}, "required": ["type"]}
    for kind in ("text", "json_object")
]
RESPONSE_FORMAT = {
    "anyOf": [
        *_PLAIN_FORMATS,
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": _NAMED,
                    "required": ["schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
        },
    ]
}
TEXT_FORMAT = {
    "anyOf": [
        *_PLAIN_FORMATS,
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, **_NAMED},
            "required": ["type", "schema"],
            "additionalProperties": False,
        },
    ]
}
_STRUCTURED_OUTPUTS = {
    "type": "object",
    "properties": {
        "json": _STRING_OR_SCHEMA,
        "regex": _STRING,
        "choice": _CHOICES,
        "grammar": _STRING,
        "json_object": {"const": True},
        "disable_any_whitespace": {"type": "boolean"},
        "whitespace_pattern": {"type": "string"},
    },
}

ResponseFormat = Annotated[AskedGrammar | None, PlainValidator(read_response_format), WithJsonSchema(RESPONSE_FORMAT)]
StructuredOutputs = Annotated[
    AskedGrammar, PlainValidator(read_structured_outputs), WithJsonSchema(_STRUCTURED_OUTPUTS)
]
GuidedJson = Annotated[AskedGrammar, PlainValidator(_read_guided_json), WithJsonSchema(_STRING_OR_SCHEMA)]
GuidedRegex = Annotated[AskedGrammar, PlainValidator(_guided(_read_regex)), WithJsonSchema(_STRING)]
GuidedChoice = Annotated[AskedGrammar, PlainValidator(_guided(_read_choice)), WithJsonSchema(_CHOICES)]
GuidedGrammar = Annotated[AskedGrammar, PlainValidator(_guided(_read_ebnf)), WithJsonSchema(_STRING)]


_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class StructuredFields(BaseModel):
    """The fields of a request that ask for a structure. At most one of them may."""

    structured_outputs: StructuredOutputs | None = None
    guided_whitespace_pattern: str | None = None  # before the field that it is about, which reads it
    guided_json: GuidedJson | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GuidedGrammar | None = None

    @model_validator(mode="after")
    def _check_only_one(self) -> Self:
        asked = self.grammar_fields()
        if len(asked) > 1:
            raise field_error(f"contradicts {asked[0][0]}; send one of them", (asked[1][0],))
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise field_error("goes with guided_json alone", (_GUIDED_WHITESPACE,))
        return self

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        """What asks for a structure, by the name of its field."""
        values = ((name, getattr(self, name, None)) for name in _FIELDS)
        return [(name, value) for name, value in values if isinstance(value, AskedGrammar)]

    @property
    def asked_grammar(self) -> tuple[Grammar, str] | None:
        """The grammar that the answer must obey, and what an error about it names; None: any text will do."""
        return next(((asked.grammar, asked.param(name)) for name, asked in self.grammar_fields()), None)


class ResponseFormatField(BaseModel):
    """`response_format`, which /v1/responses calls `text.format`."""

    response_format: ResponseFormat = None
