"""What is told of schemas that cannot be enforced: the place in the author's schema, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.engine.structured.vocabulary import Vocabulary, require_sound
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

STRING, NULL, SELF = {"type": "string"}, {"type": "null"}, {"$ref": "#"}
_OF_THE_LIBRARY = re.compile(r"coerce|Unimplemented|NoExtension|registry|\d+\(\d+\)|llguidance|retriev|Pointer")


@pytest.mark.parametrize(
    ("keyword", "value", "words"),
    [
        ("not", STRING, "say what is allowed"),
        ("oneOf", [STRING, {"type": "string", "maxLength": 3}], "write anyOf"),
        ("if", STRING, "in anyOf"),
        ("then", STRING, "in anyOf"),
        ("else", STRING, "in anyOf"),
        ("contains", STRING, "write items"),
        ("minContains", 1, "write items"),
        ("maxContains", 2, "write items"),
        ("uniqueItems", True, "leave it out"),
        ("propertyNames", {"pattern": "a"}, "write patternProperties"),
        ("dependentRequired", {"a": ["b"]}, "into required"),
        ("dependentSchemas", {"a": {}}, "in anyOf"),
        ("unevaluatedItems", False, "write items"),
        ("unevaluatedProperties", False, "write additionalProperties"),
        ("$dynamicRef", "#x", "write $defs and $ref"),
        ("$dynamicAnchor", "x", "write $defs and $ref"),
        ("$ref", "https://example.org/schema.json", "put that schema into $defs"),
        ("$ref", "#/$defs/none", "there is no schema '/$defs/none' in this document"),
        ("format", "telephone", "Write pattern"),
        ("pattern", "(a", "'(a' cannot be read: unclosed group"),
        ("pattern", "(?=a)b", "look-ahead"),
        ("type", "strin", "strin is no type"),
        ("type", ["null", "strin"], "strin is no type"),
        ("patternProperties", {"^a": STRING, "^ab": STRING}, "make them exclude each other"),
        ("patternProperties", {"(a": STRING}, "'(a' cannot be read: unclosed group"),
        ("pattern", r"\bword", "looks at what stands around"),
        ("pattern", 5, "must be a string"),
        ("minLength", -1, "must be a whole number from 0 on"),
        ("maxLength", 10**12, "is too large"),
        ("minimum", "3", "must be a number"),
        ("multipleOf", 0, "must be above 0"),
        ("required", "a", "must be an array"),
        ("required", [5], "must be an array of strings"),
        ("properties", [], "must be an object"),
        ("properties", {"a": 5}, "a schema must be an object, true or false"),
        ("$ref", "other.json#/a", "put that schema into $defs"),
        ("$ref", "#nope", "there is no schema 'nope'"),
        ("$schema", "http://example.org/mine", "this dialect of JSON Schema is not known"),
        ("$id", "::", "'::' is no address"),
    ],
)
def test_a_refusal_names_the_place_and_what_to_write_instead(
    vocabulary: Vocabulary, keyword: str, value: Any, words: str
) -> None:
    inner = {"type": "object", "properties": {"a b": {"items": {keyword: value}, "minItems": 1}}, "required": ["a b"]}
    for schema, place in (
        ({keyword: value}, ""),
        ({"anyOf": [NULL, inner]}, ".anyOf[1].properties['a b'].items"),
        (
            {"type": "array", "items": SELF | {"$ref": "#/$defs/x"}, "$defs": {"x": inner}},
            ".$defs.x.properties['a b'].items",
        ),
    ):
        with pytest.raises(InvalidRequest) as refused:
            vocabulary.compile(Grammar.json_schema(schema))
        assert refused.value.param == f"{place}.{keyword}"
        assert words in refused.value.message
        assert not _OF_THE_LIBRARY.search(refused.value.message)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(a"),
        Grammar.regex(r"[^\s\S]"),
        Grammar.ebnf("start: foo"),
        Grammar.ebnf("start: ("),
        Grammar.ebnf("start: start"),
    ],
)
def test_a_refusal_of_the_whole_is_in_plain_words(vocabulary: Vocabulary, grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as refused:
        vocabulary.compile(grammar)
    assert not refused.value.param
    assert not _OF_THE_LIBRARY.search(refused.value.message)


@pytest.mark.parametrize(
    ("schema", "told", "keyword"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, ": type, minimum, maximum contradict each other", ""),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, ": type, minLength, pattern contradict each other", ""),
        ({"type": "array", "items": False, "minItems": 1}, ": type, items, minItems contradict each other", ""),
        ({"enum": []}, "", ".enum"),
        ({"allOf": [STRING, NULL]}, "", ".allOf"),
    ],
)
def test_what_contradicts_itself_is_named_where_it_stands(
    vocabulary: Vocabulary, schema: dict[str, Any], told: str, keyword: str
) -> None:
    sound, faulty = {"type": "array", "items": STRING}, {"type": "array", "items": schema, "minItems": 2}
    whole = {"allOf": [{"type": "object", "properties": {"a": sound, "b": faulty}, "required": ["a", "b"]}]}
    for each, place in ((schema, ""), (whole, ".allOf[0].properties.b.items")):
        with pytest.raises(InvalidRequest) as refused:
            vocabulary.compile(Grammar.json_schema(each))
        assert (refused.value.message, refused.value.param) == (f"nothing obeys it{told}", f"{place}{keyword}")


def test_the_place_of_a_fault_is_found_among_many_schemas_and_is_short(vocabulary: Vocabulary) -> None:
    wide = {f"p{number}": {"type": "string", "maxLength": 9} for number in range(480)} | {"bad": {"not": STRING}}
    deep: dict[str, Any] = {"not": STRING}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    for schema, place in (({"properties": wide}, ".properties.bad.not"), (deep, ".items.items.not")):
        with pytest.raises(InvalidRequest) as refused:
            vocabulary.compile(Grammar.json_schema(schema))
        assert refused.value.param is not None
        assert refused.value.param.endswith(place)
        assert len(refused.value.param) < 310


def test_too_many_alternatives_are_told_of_in_plain_words(vocabulary: Vocabulary) -> None:
    many = [{"type": "object", "properties": {f"m{number}{n}": STRING for n in range(400)}} for number in range(3)]
    matcher = vocabulary.compile(Grammar.json_schema({"anyOf": many}))
    matcher.consume_tokens(vocabulary.tokens.tokenize_str("{"))
    matcher.compute_bitmask()
    with pytest.raises(InvalidRequest, match=r"^there are too many ways to go on"):
        require_sound(matcher)
