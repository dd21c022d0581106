"""Helper: grammars, and what an answer that obeys each of them looks like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from baton.wire.grammar import Grammar

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def _is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        set(found) - {"home"} == {"name", "age", "tags"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and isinstance(found["age"], int)
        and 0 <= found["age"] <= 120
        and len(found["tags"]) <= 3
        and all(tag in ("a", "b", 3, None) for tag in found["tags"])
        and found.get("home") in (None, True, False)
    )


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


CHOICES = ["yes", "no", 'say "maybe"\n', "yes, of course", "\u00fcber \\ alles"]
_SUM = r"\d{1,2}([+-]\d{1,2}){0,3}"

GRAMMARS: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "schema": (Grammar.json_schema(PERSON), _is_person),
    "compact": (Grammar.json_schema(PERSON, ""), lambda text: _is_person(text) and "\n" not in text),
    "object": (Grammar.json_schema({"type": "object", "maxProperties": 2}), lambda text: len(json.loads(text)) <= 2),
    "regex": (Grammar.regex(r"[0-9]{3}-[a-c]{1,4}(\u00e9|x)"), _matches(r"[0-9]{3}-[a-c]{1,4}(\u00e9|x)")),
    "choice": (Grammar.choice(CHOICES), lambda text: text in CHOICES),
    "lark": (Grammar.ebnf("start: NUM (SIGN NUM){0,3}\nNUM: /[0-9]{1,2}/\nSIGN: /[+-]/"), _matches(_SUM)),
    "gbnf": (
        Grammar.ebnf('root ::= num (("+" | "-") num){0,3}\nnum ::= [0-9] | [0-9] [0-9]'),
        _matches(_SUM),
    ),
}
