"""What compiles and has no answer is refused before anything is generated; what may end is served."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.structured.followable import MAX_OPTIONAL_MEMBERS, unfollowable
from baton.engine.structured.vocabulary import Vocabulary
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

STRING, NULL, SELF = {"type": "string"}, {"type": "null"}, {"$ref": "#"}


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
