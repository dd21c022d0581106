"""Each keyword of JSON Schema is enforced, or a schema with it is refused by its name; docs/structured_output.md lists
both. The public test suite is a command: `python -m tests.structured.keywords`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.structured.vocabulary import Vocabulary
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

_STRING, _LIST, _OBJECT = {"type": "string"}, {"type": "array"}, {"type": "object"}
ENFORCED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "type": ({"type": ["integer", "null"]}, 5, "5"),
    "enum": ({"enum": [1, "a", None]}, "a", "b"),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "properties": ({**_OBJECT, "properties": {"a": _STRING}}, {"a": "x"}, {"a": 1}),
    "required": ({**_OBJECT, "required": ["a"]}, {"a": 1}, {"b": 1}),
    "additionalProperties": ({**_OBJECT, "additionalProperties": {"type": "null"}}, {"b": None}, {"b": 1}),
    "patternProperties": ({**_OBJECT, "patternProperties": {"^a": {"type": "null"}}}, {"ab": None}, {"ab": 1}),
    "minProperties": ({**_OBJECT, "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({**_OBJECT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "items": ({**_LIST, "items": {"type": "null"}}, [None], [1]),
    "prefixItems": ({**_LIST, "prefixItems": [{"type": "null"}]}, [None, 1], [1]),
    "minItems": ({**_LIST, "minItems": 2}, [1, 2], [1]),
    "maxItems": ({**_LIST, "maxItems": 1}, [1], [1, 2]),
    "minLength": ({**_STRING, "minLength": 2}, "ab", "a"),
    "maxLength": ({**_STRING, "maxLength": 1}, "\u00e4", "ab"),
    "pattern": ({**_STRING, "pattern": "^a+$"}, "aa", "ab"),
    "format": ({**_STRING, "format": "ipv4"}, "1.2.3.4", "1.2.3"),
    "minimum": ({"type": "integer", "minimum": 5}, 5, 4),
    "maximum": ({"type": "integer", "maximum": 5}, 5, 6),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 5}, 5.5, 5),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 5}, 4, 5),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 21, 22),
    "anyOf": ({"anyOf": [_STRING, {"type": "null"}]}, None, 1),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 7, 3),
    "$ref": ({"$defs": {"a": {"type": "null"}}, **_LIST, "items": {"$ref": "#/$defs/a"}}, [None], [1]),
}
REFUSED: dict[str, Any] = {
    "not": _STRING,
    "oneOf": [{"type": "integer"}, {"minimum": 2}],
    "if": _STRING,
    "contains": _STRING,
    "minContains": 1,
    "maxContains": 1,
    "uniqueItems": True,
    "propertyNames": {"pattern": "a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


@pytest.mark.parametrize("keyword", ENFORCED)
def test_a_keyword_is_enforced(keyword: str, vocabulary: Vocabulary) -> None:
    schema, right, wrong = ENFORCED[keyword]
    assert keyword in json.dumps(schema)
    for value, is_right in ((right, True), (wrong, False)):
        matcher = vocabulary.compile(Grammar.json_schema(schema, ""))
        ids = vocabulary.tokens.tokenize_str(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_right, value


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_not_enforced_is_refused_by_name(keyword: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest) as caught:
        vocabulary.compile(Grammar.json_schema({keyword: REFUSED[keyword]}))
    assert keyword in caught.value.message


def test_the_page_lists_what_is_enforced_and_what_is_refused(vocabulary: Vocabulary) -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured_output.md").read_text()
    enforced, refused = (line for line in page.splitlines() if line.startswith(("| enforced |", "| refused |")))
    formats = next(line for line in page.splitlines() if line.startswith("| formats |"))
    assert [keyword for keyword in ENFORCED if f"`{keyword}`" not in enforced] == []
    assert [keyword for keyword in REFUSED if f"`{keyword}`" not in refused] == []
    for form in FORMATS:
        vocabulary.compile(Grammar.json_schema({"type": "string", "format": form}))
        assert f"`{form}`" in formats
