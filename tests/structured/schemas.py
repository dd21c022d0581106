"""Random JSON schemas of what can be enforced, and whether a text is valid by one of them.

`obeys` knows the keywords that `Schemas` writes and nothing else: the suite has no package that validates JSON. The
campaign has, and compares the two.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "size", "tags", "note", "is it so", "\u00e4rger", 'quo"te', "$ref", "a/b")
_WORDS = ("", "yes", "no", "a b", "\u00fc\u4e2d", 'say "x"', "back\\slash", "line\nbreak", "10", "null")
_PATTERNS = ("^[a-c]{1,3}$", "^(ab|cd)*x?$", "^[0-9]{2}-[A-Z]$", "^\\d{1,4}$", "[xy]z")
_FORMATS = ("date", "ipv4", "uuid", "time", "date-time", "email", "ipv6", "hostname", "duration")
_FACTORS = (1, 3, 10, 25)


class Schemas:
    """Schemas that some text obeys. The same ones for the same seed."""

    def __init__(self, seed: int, formats: tuple[str, ...] = _FORMATS) -> None:
        self._chance = random.Random(seed)
        self._formats = formats
        self._makers: list[Callable[[int], Schema]] = [
            self._object, self._object, self._array, self._string, self._string, self._integer, self._number,
            self._one_of_values, self._any_of, self._all_of, self._types,
        ]  # fmt: skip

    def next(self) -> Schema:
        """Another schema, of an object in most cases."""
        chance = self._chance
        schema = self._object(3) if chance.random() < 0.6 else chance.choice(self._makers)(3)
        if chance.random() < 0.25:
            schema = {"$defs": {"tree": self._tree()}, **schema}
            schema = {"$defs": schema.pop("$defs"), "anyOf": [schema, {"$ref": "#/$defs/tree"}]}
        return schema

    def _any(self, depth: int) -> Schema:
        makers = self._makers if depth > 0 else self._makers[3:8]
        return self._chance.choice(makers)(depth - 1)

    def _object(self, depth: int) -> Schema:
        chance = self._chance
        names = chance.sample(_NAMES, chance.randint(0, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        if names and chance.random() < 0.8:
            schema["required"] = chance.sample(names, chance.randint(1, len(names)))
        if chance.random() < 0.8:
            schema["additionalProperties"] = False
        elif chance.random() < 0.5:
            schema["additionalProperties"] = {"type": chance.choice(["boolean", "null", "integer"])}
        return schema

    def _array(self, depth: int) -> Schema:
        chance = self._chance
        schema: Schema = {"type": "array", "maxItems": chance.randint(0, 3)}
        if chance.random() < 0.3:
            schema["prefixItems"] = [self._any(depth - 1) for _ in range(chance.randint(1, 2))]
        schema["items"] = False if chance.random() < 0.1 else self._any(depth - 1)
        if schema["items"] is not False and chance.random() < 0.5:
            schema["minItems"] = chance.randint(0, schema["maxItems"])
        return schema

    def _string(self, depth: int) -> Schema:
        chance = self._chance
        kind = chance.random()
        if kind < 0.2 and self._formats:
            return {"type": "string", "format": chance.choice(self._formats)}
        if kind < 0.45:
            return {"type": "string", "pattern": chance.choice(_PATTERNS)}
        if kind < 0.55:
            return {"type": "string"}
        shortest = chance.randint(0, 4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + chance.randint(0, 6)}

    def _integer(self, depth: int) -> Schema:
        chance = self._chance
        low = chance.randint(-1000, 1000)
        kind = chance.random()
        if kind < 0.2:
            return {"type": "integer"}
        if kind < 0.5:
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 300)}
        if kind < 0.7:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + chance.randint(2, 50)}
        return {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": chance.choice(_FACTORS)}

    def _number(self, depth: int) -> Schema:
        chance = self._chance
        if chance.random() < 0.4:
            return {"type": "number"}
        low = round(chance.uniform(-50, 50), 2)
        return {"type": "number", "minimum": low, "maximum": low + chance.randint(1, 9)}

    def _one_of_values(self, depth: int) -> Schema:
        chance = self._chance
        values: list[Any] = [*chance.sample(_WORDS, 3), chance.randint(-5, 5), None, True, 0.5, [1, "x"], {"k": [None]}]
        if chance.random() < 0.3:
            return {"const": chance.choice(values)}
        return {"enum": chance.sample(values, chance.randint(1, 4))}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._chance.randint(1, 3))]}

    def _all_of(self, depth: int) -> Schema:
        low = self._chance.randint(0, 90)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 20}]}

    def _types(self, depth: int) -> Schema:
        return {"type": self._chance.sample(["null", "boolean", "integer"], self._chance.randint(1, 3))}

    def _tree(self) -> Schema:
        """Refers to itself."""
        members = {"value": self._integer(0), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}
        return {"type": "object", "properties": members, "required": ["value"], "additionalProperties": False}


def obeys(schema: Any, text: str) -> bool:
    """Whether `text` is JSON that is valid by `schema`."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return _is_valid(schema, value, schema)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def _is_valid(schema: Any, value: Any, root: Any) -> bool:
    if isinstance(schema, bool):
        return schema
    return all(_CHECKS[keyword](schema, value, root) for keyword in schema)


def _has_type(schema: Schema, value: Any) -> bool:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_TYPES[name](value) for name in names)


def _number_check(compare: Callable[[float, float], bool], keyword: str) -> Callable[[Schema, Any, Any], bool]:
    return lambda schema, value, root: not _TYPES["number"](value) or compare(value, schema[keyword])


_Check = Callable[[Schema, Any, Any], bool]


def _length_check(kind: type[list[Any]] | type[str], compare: Callable[[int, int], bool], keyword: str) -> _Check:
    return lambda schema, value, root: not isinstance(value, kind) or compare(len(value), schema[keyword])


def _same(first: Any, second: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _has_valid_items(schema: Schema, value: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    first = schema.get("prefixItems", [])
    each = [*first, *[schema.get("items", True)] * max(0, len(value) - len(first))]
    return all(_is_valid(one, item, root) for one, item in zip(each, value, strict=False))


def _has_valid_members(schema: Schema, value: Any, root: Any) -> bool:
    if not isinstance(value, dict):
        return True
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(_is_valid(known.get(name, others), member, root) for name, member in value.items())


_CHECKS: dict[str, Callable[[Schema, Any, Any], bool]] = {
    "$defs": lambda schema, value, root: True,
    "$ref": lambda schema, value, root: _is_valid(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value, root),
    "type": lambda schema, value, root: _has_type(schema, value),
    "enum": lambda schema, value, root: any(_same(value, one) for one in schema["enum"]),
    "const": lambda schema, value, root: _same(value, schema["const"]),
    "anyOf": lambda schema, value, root: any(_is_valid(one, value, root) for one in schema["anyOf"]),
    "allOf": lambda schema, value, root: all(_is_valid(one, value, root) for one in schema["allOf"]),
    "properties": _has_valid_members,
    "additionalProperties": _has_valid_members,
    "required": lambda schema, value, root: not isinstance(value, dict) or set(schema["required"]) <= set(value),
    "items": _has_valid_items,
    "prefixItems": _has_valid_items,
    "minItems": _length_check(list, lambda length, bound: length >= bound, "minItems"),
    "maxItems": _length_check(list, lambda length, bound: length <= bound, "maxItems"),
    "minLength": _length_check(str, lambda length, bound: length >= bound, "minLength"),
    "maxLength": _length_check(str, lambda length, bound: length <= bound, "maxLength"),
    "pattern": lambda schema, value, root: not isinstance(value, str) or bool(re.search(schema["pattern"], value)),
    "minimum": _number_check(lambda number, bound: number >= bound, "minimum"),
    "maximum": _number_check(lambda number, bound: number <= bound, "maximum"),
    "exclusiveMinimum": _number_check(lambda number, bound: number > bound, "exclusiveMinimum"),
    "exclusiveMaximum": _number_check(lambda number, bound: number < bound, "exclusiveMaximum"),
    "multipleOf": _number_check(lambda number, factor: number % factor == 0, "multipleOf"),
}
