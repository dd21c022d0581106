"""What is told of schemas that cannot be enforced: the place in the author's schema, and what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.structured.schema_faults import MAX_OPTIONAL_MEMBERS, unfollowable
from engine.structured.vocabulary import Vocabulary, require_sound
from wire.errors import InvalidRequest
from wire.grammar import Grammar

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


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (SELF, ".$ref"),
        ({"$ref": ""}, ".$ref"),
        ({"$anchor": "a", "type": "array", "items": {"$ref": "#a"}, "minItems": 1}, ".items.$ref"),
        ({"type": "object", "additionalProperties": SELF, "required": ["a"]}, ".additionalProperties.$ref"),
        ({"type": "object", "additionalProperties": SELF, "minProperties": 1}, ".additionalProperties.$ref"),
        (
            {"type": "object", "patternProperties": {"^a": SELF}, "additionalProperties": False, "required": ["a"]},
            ".patternProperties['^a'].$ref",
        ),
        (
            {
                "properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}, {"$ref": "#/anyOf/0"}]}},
                "anyOf": [{"$ref": "#/properties/x"}],
            },
            ".anyOf[0].$ref",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ".$ref"),
        ({"anyOf": [SELF, SELF]}, ".anyOf[0].$ref"),
        ({"allOf": [STRING, SELF]}, ".allOf[1].$ref"),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, ".properties.a.$ref"),
        ({"type": "array", "items": SELF, "minItems": 1}, ".items.$ref"),
        ({"type": "array", "prefixItems": [STRING, SELF], "minItems": 2}, ".prefixItems[1].$ref"),
        # whoever begins the optional member never ends it
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, ".properties.a.$ref"),
        ({"anyOf": [NULL, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}}, ".anyOf[1].$ref"),
    ],
)
def test_a_circle_that_never_ends_is_refused_before_anything_is_generated(
    vocabulary: Vocabulary, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(InvalidRequest, match="never ends") as refused:
        vocabulary.compile(Grammar.json_schema(schema))
    assert refused.value.param == place


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [SELF, NULL]},
        {"type": "object", "properties": {"a": SELF}},
        {"type": "object", "properties": {"a": {"anyOf": [SELF, NULL]}}, "required": ["a"]},
        {"type": "array", "items": SELF},
        {"type": "object", "additionalProperties": SELF},
        {
            "type": "object",
            "properties": {"a": STRING},
            "required": ["a"],
            "minProperties": 1,
            "additionalProperties": SELF,
        },
        {"type": "object", "properties": {"a": STRING, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/properties/a"}}, SELF]}},
            "required": ["a"],
        },
        {"type": "array", "prefixItems": [STRING], "items": SELF, "minItems": 1},
        {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
        {
            "$ref": "#/$defs/tree",
            "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
        },
        {"$defs": {"never": {"$ref": "#/$defs/never"}}, "type": "string"},
    ],
)
def test_a_circle_that_may_end_is_served(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    vocabulary.compile(Grammar.json_schema(schema))


def test_long_chains_of_references_cost_little() -> None:
    chain: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(5000)}
    for last, expected in ((STRING, None), ({"$ref": "#/$defs/a0"}, ".$ref")):
        for names in (list(chain), list(reversed(chain))):
            ordered = {name: chain[name] for name in names} | {"a5000": last}
            found = unfollowable({"$ref": "#/$defs/a0", "$defs": ordered})
            assert (found and found.place) == expected


@pytest.mark.parametrize("additional", [True, False])
def test_an_object_with_too_many_optional_members_is_refused_before_anything_is_generated(
    vocabulary: Vocabulary, additional: bool
) -> None:
    names = [f"m{number}" for number in range(MAX_OPTIONAL_MEMBERS + 2)]
    most: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": names[:2],
        "additionalProperties": additional,
    }
    matcher = vocabulary.compile(Grammar.json_schema(most))
    for token_id in vocabulary.tokens.tokenize_str('{"m0": 1, "m1": 2, "m300": 3'):
        assert matcher.consume_token(token_id)
        assert any(matcher.compute_bitmask())
    with pytest.raises(InvalidRequest, match="491 members are not required") as refused:
        vocabulary.compile(Grammar.json_schema({"type": "array", "items": most | {"required": ["m0"]}}))
    assert refused.value.param == ".items.properties"


def test_too_many_alternatives_are_told_of_in_plain_words(vocabulary: Vocabulary) -> None:
    many = [{"type": "object", "properties": {f"m{number}{n}": STRING for n in range(400)}} for number in range(3)]
    matcher = vocabulary.compile(Grammar.json_schema({"anyOf": many}))
    matcher.consume_tokens(vocabulary.tokens.tokenize_str("{"))
    matcher.compute_bitmask()
    with pytest.raises(InvalidRequest, match=r"^there are too many ways to go on"):
        require_sound(matcher)
