"""A small part of `python -m tests.structured.campaign`: random schemas, and answers that are valid by them."""

from __future__ import annotations

import pytest

from baton.wire.grammar import Grammar
from tests.checkpoints import make_checkpoint
from tests.structured.engine_answers import MAX_TOKENS, EngineAnswers
from tests.structured.schemas import Schemas, obeys

NUM_SCHEMAS = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineAnswers:
    return EngineAnswers(make_checkpoint(tmp_path_factory.mktemp("campaign"), "qwen2"), seed=1)


def test_answers_to_random_schemas_are_valid_or_cut(engine: EngineAnswers) -> None:
    source = Schemas(seed=5, formats=())
    schemas = [source.next() for _ in range(NUM_SCHEMAS)]
    grammars = [Grammar.json_schema(schema, "") for schema in schemas]
    assert [engine.refusal(grammar) for grammar in grammars] == [""] * NUM_SCHEMAS
    num_whole = num_forced = 0
    for answer in engine.answers(grammars, (0.0, 1.5)):
        num_forced += answer.num_forced
        if answer.finish_reason == "length":
            assert answer.num_tokens == MAX_TOKENS
        else:
            assert obeys(schemas[answer.place], answer.text), (schemas[answer.place], answer.text)
            num_whole += 1
    assert num_whole > NUM_SCHEMAS
    assert num_forced > NUM_SCHEMAS
    assert engine.num_moved > 3
    assert engine.num_cached_tokens > 100


@pytest.mark.parametrize(
    ("schema", "text", "is_valid"),
    [
        ({"type": "integer", "minimum": 3}, "3", True),
        ({"type": "integer", "exclusiveMinimum": 3}, "3", False),
        ({"type": "integer"}, "true", False),
        ({"enum": [1, "a"]}, "true", False),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, "[1, 2]", False),
        ({"$defs": {"a": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a"}]}, "null", True),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, '{"b": 1}', False),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "{}", False),
        ({"type": "string", "pattern": "b", "maxLength": 2}, '"abc"', False),
        ({"type": "string"}, '"a', False),
    ],
)
def test_the_check_tells_valid_from_invalid(schema: dict[str, object], text: str, is_valid: bool) -> None:
    assert obeys(schema, text) is is_valid
