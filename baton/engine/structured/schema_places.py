"""Where schemas stand in a JSON schema, and what its references name.

Owns which keywords have schemas in them. Knows neither what they mean nor llguidance. A path is the names and numbers
that lead from the root to a schema; a place is a path as its author would write it, such as `.properties.x.items`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
UNUSED = ("$defs", "definitions")
"""Schemas in them obey nobody unless a reference names them."""
REF, _ANCHOR = "$ref", "$anchor"
_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_MAX_SHOWN, _MAX_PLACE_CHARS = 60, 300

Schema: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]


class Fault(NamedTuple):
    """`place`: where in the schema; "" for the whole. `reason`: a sentence without a subject, or a clause."""

    place: str
    reason: str


class References:
    """The schemas that references within `root` name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        everything = list(schemas_in(root))
        self._anchors = {
            f"#{each[_ANCHOR]}": (path, each) for path, each in everything if isinstance(each.get(_ANCHOR), str)
        }
        named = dict.fromkeys(reference for _, each in everything if (reference := reference_of(each)) is not None)
        self.known = {reference: found[1] for reference in named if (found := self.at(reference)) is not None}
        """What each of them names, but for those that name nothing here."""

    def at(self, reference: str) -> tuple[Path, Any] | None:
        """The schema that a pointer into the root or an anchor names, and its place. None for any other reference, and
        for one to nothing."""
        if reference not in ("", "#") and not reference.startswith("#/"):
            return self._anchors.get(reference)
        found, path = self._root, []
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            key = int(name) if isinstance(found, list) and name.isdecimal() else name
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
            path.append(key)
        return tuple(path), found


def reference_of(schema: Schema) -> str | None:
    """The `$ref` of a schema, if it has one."""
    found = schema.get(REF)
    return found if isinstance(found, str) else None


def required_of(schema: Schema) -> set[str]:
    """The members that an object has to have."""
    return {name for name in listed(schema, "required") if isinstance(name, str)}


def listed(schema: Schema, name: str) -> list[Any]:
    """The values under a keyword, if they are an array; else none."""
    found = schema.get(name)
    return found if isinstance(found, list) else []


def members(schema: Schema, name: str) -> dict[str, Any]:
    """The members under a keyword, if it has an object; else none."""
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def schemas_in(schema: Any, path: Path = (), without: tuple[str, ...] = ()) -> Iterator[tuple[Path, Schema]]:
    """`schema` and all schemas in it, outer ones first, with their places."""
    waiting: list[tuple[Path, Any]] = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict):
            yield path, schema
            inner = [((*path, *name), each) for name, each in inner_schemas(schema, without)]
            waiting += reversed(inner)


def inner_schemas(schema: Schema, without: tuple[str, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """The values directly in `schema` where a schema has to stand."""
    for name in _ONE:
        if name in schema and not isinstance(schema[name], list):
            yield (name,), schema[name]
    for name in _SEVERAL:
        yield from (((name, number), each) for number, each in enumerate(listed(schema, name)))
    for name in _NAMED:
        if name not in without:
            yield from (((name, key), each) for key, each in members(schema, name).items())


def place_of(path: Path) -> str:
    """The path as text for a person: short, however long the path is."""
    text = "".join(f"[{each}]" if isinstance(each, int) else _member(each) for each in path)
    half = _MAX_PLACE_CHARS // 2
    return text if len(text) <= _MAX_PLACE_CHARS else f"{text[:half]}...{text[-half:]}"


def _member(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name) and len(name) <= _MAX_SHOWN:
        return f".{name}"
    return f"[{name[:_MAX_SHOWN]!r}]"
