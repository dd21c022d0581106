"""A grammar writes dates and times that exist."""

from __future__ import annotations

import pytest

from baton.engine.structured.vocabulary import Vocabulary
from baton.wire.grammar import Grammar

CASES = {
    "date": {
        "2023-02-28": True, "2023-02-29": False, "2024-02-29": True, "1900-02-29": False, "2000-02-29": True,
        "0000-01-01": False, "0001-01-01": True, "2023-04-31": False, "2023-12-31": True, "2023-13-01": False,
    },
    "time": {"12:00:59Z": True, "12:00:60Z": False, "23:59:60Z": False, "00:00:00.25+01:30": True, "24:00:00Z": False},
    "date-time": {
        "2023-02-28T10:00:00Z": True, "2023-02-29T10:00:00Z": False, "2023-02-28T10:00:60Z": False,
        "2024-02-29t10:00:00-08:00": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", CASES)
def test_only_what_exists_is_written(form: str, vocabulary: Vocabulary) -> None:
    for schema in ({"format": form, "type": "string"}, {"properties": {"a": {"format": form}}}):
        compiled = vocabulary.compile(Grammar.json_schema(schema, ""))
        for text, is_right in CASES[form].items():
            matcher = compiled.deep_copy()
            written = f'"{text}"' if "type" in schema else f'{{"a":"{text}"}}'
            ids = vocabulary.tokens.tokenize_str(written)
            is_written = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_written is is_right, (written, is_written)


def test_what_is_no_schema_stays_as_it_is(vocabulary: Vocabulary) -> None:
    value = {"format": "date", "type": "string"}
    matcher = vocabulary.compile(Grammar.json_schema({"const": value}, ""))
    ids = vocabulary.tokens.tokenize_str('{"format":"date","type":"string"}')
    assert matcher.try_consume_tokens(ids) == len(ids)
    vocabulary.compile(Grammar.json_schema({"properties": {"format": {"type": "string"}}}))
