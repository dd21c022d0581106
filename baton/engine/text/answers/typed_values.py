"""Argument values that a model wrote as bare text, as JSON of the type that the function's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of the parameters of each function, by its name."""

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 8


def is_plain_string(schemas: Schemas, function: str, parameter: str) -> bool:
    """Whether whatever the model writes is the string."""
    return _types(_parameter(schemas, function, parameter)) in ({"string"}, set())


def typed_value(schemas: Schemas, function: str, parameter: str, text: str) -> str:
    """`text` as JSON: as it stands where the schema allows what it says, otherwise as a string."""
    types = _types(_parameter(schemas, function, parameter))
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    if "string" in types and _type_of(value) not in types:
        return quoted(text)
    return bare


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return f'"{inside_quotes(text)}"'


def inside_quotes(text: str) -> str:
    """The text between the quotes of a JSON string; joined pieces are the joined text's."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(word: str) -> None:
    raise ValueError(word)


def _parameter(schemas: Schemas, function: str, parameter: str) -> Any:
    properties = schemas.get(function, {}).get("properties")
    return properties.get(parameter) if isinstance(properties, Mapping) else None


def _types(schema: Any, depth: int = 0) -> set[str]:
    """The types that a schema names; none: a string, as far as one can tell."""
    if not isinstance(schema, Mapping) or depth == _MAX_DEPTH:
        return set()
    named = schema.get("type")
    found = {item for item in (named if isinstance(named, list) else [named]) if isinstance(item, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            found |= _types(option, depth + 1)
    if "integer" in found:
        found.add("number")
    if not found and isinstance(schema.get("enum"), list):
        found = {_type_of(value) for value in schema["enum"]}
    return found or ({"object"} if "$ref" in schema or "properties" in schema else set())


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
