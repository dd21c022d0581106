"""What is wrong with a JSON schema, in the words of its author: the place in it, and what to write instead.

Owns where schemas stand in a schema, the references that never end, and what is told for each reason of llguidance.
Does not compile: `engine.structured.vocabulary` does. A place is a path such as `.properties.x.oneOf`, below the field
that the schema came with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_UNUSED = ("$defs", "definitions")
"""Schemas in them obey nobody unless a reference names them."""
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_REF = "$ref"
_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_EXPRESSION = re.compile(r"regex parse error:\n\s*(.+)\n(?:.*\n)*error: (.+)")
_MAX_SHOWN = 60

Schema = Mapping[str, Any]


class Fault(NamedTuple):
    """`place`: see the module; "" for the whole. `reason`: a sentence without a subject, or a clause."""

    place: str
    reason: str


def endless_reference(schema: Any) -> Fault | None:
    """The first `$ref` of which no instance ever ends: it leads back to itself whatever is chosen. A model that has
    begun one could write for ever, or nothing. None: there is no such reference."""
    targets = _Targets(schema)
    for place, each in _walk(schema, "", targets):
        reference = each.get(_REF)
        if isinstance(reference, str) and not targets.ends(reference):
            reason = "leads back to itself in a circle that never ends: make what repeats optional, or allow null"
            return Fault(f"{place}.{_REF}", reason)
    return None


def explained(schema: Any, reason: str) -> Fault:
    """What llguidance said of `schema`, for its author."""
    for pattern, explain in _REASONS:
        found = pattern.search(reason)
        if found is not None:
            return explain(schema, found)
    return Fault("", reason)


class _Targets:
    """The schemas that references within `root` name, and which of them have an instance that ends.

    That is the least fixed point: nothing ends before it is shown to, so a circle never does.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ending: set[str] = set()
        references = {each[_REF] for _, each in _schemas(root, "") if isinstance(each.get(_REF), str)}
        self._known = {reference: found for reference in references if (found := self.at(reference)) is not None}
        self._find_ending()

    def _find_ending(self) -> None:
        """Looks at a schema again only when one that it refers to was shown to end, so long chains cost little."""
        referring: dict[str, list[str]] = {reference: [] for reference in self._known}
        for reference, target in self._known.items():
            for _, each in _schemas(target, "", without=_UNUSED):
                named = each.get(_REF)
                if isinstance(named, str) and named in referring:
                    referring[named].append(reference)
        waiting = list(self._known)
        while waiting:
            reference = waiting.pop()
            if reference not in self._ending and self._ends(self._known[reference]):
                self._ending.add(reference)
                waiting += referring[reference]

    def at(self, reference: str) -> Any:
        """The schema at a pointer into the root; None for any other reference, and for one to nothing."""
        if not reference.startswith("#") or (reference != "#" and not reference.startswith("#/")):
            return None
        found = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        return found

    def ends(self, reference: str) -> bool:
        """Whether something that is valid by the schema at `reference` ends."""
        return reference in self._ending or reference not in self._known

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return True
        reference = schema.get(_REF)
        if isinstance(reference, str) and not self.ends(reference):
            return False
        if not all(map(self._ends, _listed(schema, "allOf"))):
            return False
        if any((found := _listed(schema, name)) and not any(map(self._ends, found)) for name in ("anyOf", "oneOf")):
            return False
        return self._ends_by_type(schema)

    def _ends_by_type(self, schema: Schema) -> bool:
        found = schema.get("type")
        types = {found} if isinstance(found, str) else set(found) if isinstance(found, list) else set(_SCALARS)
        if types & _SCALARS or "const" in schema or "enum" in schema:
            return True
        ends = False
        if "object" in types:
            properties, required = schema.get("properties"), _listed(schema, "required")
            known = properties if isinstance(properties, dict) else {}
            ends = all(self._ends(known.get(name)) for name in required if isinstance(name, str))
        if "array" in types and not ends:
            count, first = schema.get("minItems", 0), _listed(schema, "prefixItems")
            count = count if isinstance(count, int) else 0
            ends = all(map(self._ends, first[:count])) and (count <= len(first) or self._ends(schema.get("items")))
        return ends


def _listed(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _walk(root: Any, place: str, targets: _Targets) -> Iterator[tuple[str, Schema]]:
    """The schemas that something may have to obey: those in `root`, and those that references in them name."""
    seen: set[str] = set()
    waiting = [(place, root)]
    while waiting:
        place, schema = waiting.pop(0)
        for at, each in _schemas(schema, place, without=_UNUSED):
            yield at, each
            reference = each.get(_REF)
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append((_as_place(reference), targets.at(reference)))


def _as_place(reference: str) -> str:
    return "".join(_member(part.replace("~1", "/").replace("~0", "~")) for part in reference.split("/")[1:])


def _schemas(schema: Any, place: str, without: tuple[str, ...] = ()) -> Iterator[tuple[str, Schema]]:
    """`schema` and all schemas in it, outer ones first, with their places."""
    waiting = [(place, schema)]
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield place, schema
        inner: list[tuple[str, Any]] = [(f"{place}.{name}", schema[name]) for name in _ONE if name in schema]
        for name in _SEVERAL:
            inner += [(f"{place}.{name}[{number}]", each) for number, each in enumerate(_listed(schema, name))]
        for name in _NAMED:
            found = schema.get(name)
            if isinstance(found, dict) and name not in without:
                inner += [(f"{place}.{name}{_member(key)}", each) for key, each in found.items()]
        waiting += reversed(inner)


def _member(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name) and len(name) <= _MAX_SHOWN:
        return f".{name}"
    return f"[{name[:_MAX_SHOWN]!r}]"


def _place_of(schema: Any, keyword: str, is_meant: Callable[[Any], bool] = lambda _: True) -> str:
    """The place of the first `keyword` whose value is the one that is meant; "" where there is none."""
    places = (
        f"{place}.{keyword}" for place, each in _schemas(schema, "") if keyword in each and is_meant(each[keyword])
    )
    return next(places, "")


_INSTEAD: Mapping[str, str] = {
    "contains": "write items for all of them, or prefixItems for the first",
    "dependentRequired": "put the members into required, or describe each case in anyOf",
    "dependentSchemas": "describe each case in anyOf",
    "else": "describe each case in anyOf",
    "if": "describe each case in anyOf",
    "maxContains": "write items for all of them, or prefixItems for the first",
    "minContains": "write items for all of them, or prefixItems for the first",
    "not": "say what is allowed: type, enum or pattern",
    "propertyNames": "write patternProperties, with additionalProperties false",
    "then": "describe each case in anyOf",
    "unevaluatedItems": "write items",
    "unevaluatedProperties": "write additionalProperties, with all members in properties",
    "uniqueItems": "leave it out and look at the answer, or name each item by prefixItems and enum",
    "$dynamicAnchor": "write $defs and $ref",
    "$dynamicRef": "write $defs and $ref",
}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def _of_keyword(schema: Any, found: re.Match[str]) -> Fault:
    name = found[1]
    instead = _INSTEAD.get(name, "leave it out")
    return Fault(_place_of(schema, name), f"the keyword {name} cannot be enforced: {instead}")


def _of_one_of(schema: Any, _: re.Match[str]) -> Fault:
    place = _place_of(schema, "oneOf", lambda value: isinstance(value, list) and len(value) > 1)
    reason = "oneOf can be enforced only where its alternatives exclude each other by type or constant: write anyOf"
    return Fault(place, reason)


def _of_reference(schema: Any, found: re.Match[str]) -> Fault:
    place = _place_of(schema, _REF, lambda value: isinstance(value, str) and value.endswith(found[1]))
    return Fault(place, f"there is no schema {found[1][:_MAX_SHOWN]} in this document")


def _of_other_document(schema: Any, _: re.Match[str]) -> Fault:
    place = _place_of(schema, _REF, lambda value: isinstance(value, str) and not value.startswith("#"))
    return Fault(place, "refers to another document, which is not fetched: put that schema into $defs")


def _of_format(schema: Any, found: re.Match[str]) -> Fault:
    place = _place_of(schema, "format", lambda value: value == found[1])
    return Fault(place, f"the format is not known: {', '.join(FORMATS)} are. Write pattern, or leave it out")


def _of_expression(schema: Any, found: re.Match[str]) -> Fault:
    said = _EXPRESSION.search(found.string)
    if said is None:
        return Fault("", "an expression in it cannot be read")
    place = _place_of(schema, "pattern", lambda value: isinstance(value, str) and said[1] in value)
    return Fault(place, f"the expression {said[1][:_MAX_SHOWN]!r} cannot be read: {said[2]}")


def _of_expressions(schema: Any, found: re.Match[str]) -> Fault:
    both = f"{found[1][:_MAX_SHOWN]} and {found[2][:_MAX_SHOWN]}"
    return Fault(
        _place_of(schema, "patternProperties"), f"{both} may match the same name: make them exclude each other"
    )


def _of_properties(schema: Any, _: re.Match[str]) -> Fault:
    place = _place_of(schema, "minProperties") or _place_of(schema, "maxProperties")
    reason = (
        "how many members there are can be enforced only where all of properties are required, or as 0 or 1 with "
        "additionalProperties false"
    )
    return Fault(place, reason)


def _of_type(schema: Any, found: re.Match[str]) -> Fault:
    place = _place_of(schema, "type", lambda value: found[1] in (value if isinstance(value, list) else (value,)))
    return Fault(place, f"{found[1][:_MAX_SHOWN]} is no type")


def _unsatisfiable(_: Any, found: re.Match[str]) -> Fault:
    return Fault("", f"nothing obeys it: {found[1]}" if found[1] else "nothing obeys it")


_REASONS: tuple[tuple[re.Pattern[str], Callable[[Any, re.Match[str]], Fault]], ...] = tuple(
    (re.compile(pattern), explain)
    for pattern, explain in (
        (r'Unimplemented keys: \["([^"]+)"', _of_keyword),
        (r"oneOf constraints are not supported", _of_one_of),
        (r"Pointer '(.*)' does not exist", _of_reference),
        (r"is not present in a registry", _of_other_document),
        (r"Unknown format: (.+)", _of_format),
        (r"regex parse error", _of_expression),
        (r"patternProperty regexes (.+) and (.+) are not disjoint", _of_expressions),
        (r"min/maxProperties only supported", _of_properties),
        (r"Invalid type: (.+)", _of_type),
        (r"Unsatisfiable schema:? ?(.*)", _unsatisfiable),
        (r"NoExtensionBias()|no text obeys the grammar()", _unsatisfiable),
    )
)
