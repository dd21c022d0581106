"""What is wrong with a JSON schema, in the words of its author: the place in it, and what to write instead.

Owns where schemas stand in a schema, what compiles and has no answer, and what is told for each reason of llguidance.
Does not compile: `engine.structured.vocabulary` does. A place is a path such as `.properties.x.oneOf`, below the field
that the schema came with.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

from engine.text.answers.grammars import moved_references

_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_UNUSED = ("$defs", "definitions")
"""Schemas in them obey nobody unless a reference names them."""
_SCALARS = ("string", "number", "integer", "boolean", "null")
_REF, _ANCHOR = "$ref", "$anchor"
_CONTRADICTING = (
    "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "prefixItems", "items", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
    "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", _REF,
)  # fmt: skip
_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_EXPRESSION = re.compile(r"regex parse error:\n\s*(.+)\n(?:.*\n)*error: (.+)")
_ADDRESS = re.compile(r"(?:Resource|Invalid URI reference) '(.*)'(?: is not present in a registry|: )")
_MAX_SHOWN, _MAX_PLACE_CHARS = 60, 300

Schema: TypeAlias = Mapping[str, Any]
_Path: TypeAlias = tuple[str | int, ...]
_Said: TypeAlias = tuple[str, str]
"""The keyword at fault, "" for none, and the reason."""
_ROOT: _Path = ()
_DEFINITIONS, _WHOLE = "$defs", "whole"
MAX_OPTIONAL_MEMBERS = 490
"""llguidance gives up at 2,000 ways to go on, and has four for each of them."""
_MAX_TRIES, _MAX_TRIED_CHARS = 256, 2**21
"""What is compiled to find the schema at fault: so many schemas, and so many characters of whole ones in all."""


class Fault(NamedTuple):
    """`place`: see the module; "" for the whole. `reason`: a sentence without a subject, or a clause."""

    place: str
    reason: str


def unfollowable(schema: Any) -> Fault | None:
    """What compiles in `schema` and yet has no answer. None: nothing.

    A `$ref` of which no instance ever ends leads back to itself whatever is chosen: a model that has begun one could
    write for ever, or nothing. Of an object with too many members to choose from no mask can be made.
    """
    targets = _Targets(schema)
    for path, each in _walk(schema, targets):
        reference = each.get(_REF)
        if isinstance(reference, str) and not targets.ends(reference):
            reason = "leads back to itself in a circle that never ends: make what repeats optional, or allow null"
            return Fault(_place((*path, _REF)), reason)
        num_optional = len(_members(each, "properties").keys() - set(filter(_is_text, _listed(each, "required"))))
        if num_optional > MAX_OPTIONAL_MEMBERS:
            reason = f"{num_optional} members are not required, at most {MAX_OPTIONAL_MEMBERS} can be: add required"
            return Fault(_place((*path, "properties")), reason)
    return None


def explained(schema: Schema, reason: str, reason_against: Callable[[Schema], str]) -> Fault:
    """What llguidance said of `schema`, for its author. `reason_against`: what it says of another schema, "" when it
    takes it."""
    path, part, reason = _innermost(schema, reason, reason_against)
    keyword, told = _said(part, reason) or ("", "it cannot be enforced: say it by fewer or other keywords")
    return Fault(_place((*path, keyword) if keyword in part else path), told)


def in_plain_words(reason: str) -> str:
    """What llguidance said of a grammar that is no schema."""
    said = _said({}, reason)
    return reason if said is None else said[1]


def _said(part: Schema, reason: str) -> _Said | None:
    """None: it is not known what `reason` means."""
    for pattern, explain in _REASONS:
        found = pattern.search(reason)
        if found is not None:
            return explain(part, found)
    return None


def _innermost(root: Schema, reason: str, reason_against: Callable[[Schema], str]) -> tuple[_Path, Schema, str]:
    """The schema within `root` that is at fault by itself while none in it is, and what is said of it."""
    address = _ADDRESS.match(reason)
    if address is not None:  # all addresses are looked at, wherever they stand, so all schemas seem to be at fault
        path, part = next((found for found in _schemas(root) if _keyword_with(found[1], address[1])), (_ROOT, root))
        return path, part, reason
    targets, moved = _Targets(root), moved_references(root, f"#/$defs/{_WHOLE}")
    part, path, seen = root, _ROOT, {_ROOT}
    left = min(_MAX_TRIES, _MAX_TRIED_CHARS // len(json.dumps(root)))
    waiting = _parts(root, path, targets, reason)
    while left and (found := next(waiting, None)) is not None:
        inner_path, inner = found
        if inner_path not in seen:
            seen.add(inner_path)
            left -= 1
            pointer = "/".join(quote(str(name).replace("~", "~0").replace("/", "~1")) for name in inner_path)
            against = reason_against({_REF: f"#/$defs/{_WHOLE}/{pointer}", _DEFINITIONS: {_WHOLE: moved}})
            if against:
                path, part, reason = inner_path, inner, against
                waiting = _parts(part, path, targets, reason)
    return path, part, reason


def _parts(schema: Schema, path: _Path, targets: _Targets, reason: str) -> Iterator[tuple[_Path, Schema]]:
    """The schemas that stand in `schema`, and the one that it refers to, as far as `reason` may be about them."""
    keyword = (_said({}, reason) or ("",))[0]
    for name, each in _inner(schema, without=_UNUSED):
        text = json.dumps(each) if keyword else ""
        if isinstance(each, dict) and (f'"{keyword}"' in text or f'"{_REF}"' in text or not keyword):
            yield (*path, *name), each
    reference = schema.get(_REF)
    found = targets.at(reference) if isinstance(reference, str) else None
    if found is not None and isinstance(found[1], dict):
        yield found


class _Targets:
    """The schemas that references within `root` name, and which of them have an instance that ends.

    That is the least fixed point: nothing ends before it is shown to, so a circle never does.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ending: set[str] = set()
        everything = list(_schemas(root))
        self._anchors = {
            f"#{each[_ANCHOR]}": (path, each) for path, each in everything if isinstance(each.get(_ANCHOR), str)
        }
        references = dict.fromkeys(each[_REF] for _, each in everything if isinstance(each.get(_REF), str))
        self._known = {reference: found[1] for reference in references if (found := self.at(reference)) is not None}
        waiting, num_ending = self._innermost_first(), -1
        while num_ending != len(self._ending):  # one round and a last one, but for circles in circles
            num_ending = len(self._ending)
            for reference in waiting:
                if self._ends(self._known[reference]):
                    self._ending.add(reference)
            waiting = [reference for reference in waiting if reference not in self._ending]

    def _innermost_first(self) -> list[str]:
        """The references, each behind those that its schema needs as far as there is no circle."""
        ordered: list[str] = []
        seen: set[str] = set()
        waiting = [(reference, False) for reference in self._known]
        while waiting:
            reference, is_behind = waiting.pop()
            if is_behind:
                ordered.append(reference)
            elif reference in self._known and reference not in seen:
                seen.add(reference)
                needed = (each[_REF] for _, each in _schemas(self._known[reference]) if isinstance(each.get(_REF), str))
                waiting += [(reference, True), *((other, False) for other in needed)]
        return ordered

    def at(self, reference: str) -> tuple[_Path, Any] | None:
        """The schema that a pointer into the root or an anchor names, and where it stands; None for any other
        reference, and for one to nothing."""
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
        types = [found] if isinstance(found, str) else found if isinstance(found, list) else _SCALARS
        if any(each in _SCALARS for each in types) or "const" in schema or "enum" in schema:
            return True
        return ("object" in types and self._object_ends(schema)) or ("array" in types and self._array_ends(schema))

    def _object_ends(self, schema: Schema) -> bool:
        properties, others = _members(schema, "properties"), self._others_end(schema)
        required = set(filter(_is_text, _listed(schema, "required")))
        if not all(self._ends(properties[name]) if name in properties else others for name in required):
            return False
        optional = (each for name, each in properties.items() if name not in required)
        return _number(schema, "minProperties") <= len(required) or others or any(map(self._ends, optional))

    def _others_end(self, schema: Schema) -> bool:
        """Whether there may be members beside `properties` that end."""
        others = (schema.get("additionalProperties"), *_members(schema, "patternProperties").values())
        return any(each is not False and self._ends(each) for each in others)

    def _array_ends(self, schema: Schema) -> bool:
        count, first = _number(schema, "minItems"), _listed(schema, "prefixItems")
        return all(map(self._ends, first[:count])) and (count <= len(first) or self._ends(schema.get("items")))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _listed(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _members(schema: Schema, name: str) -> dict[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def _number(schema: Schema, name: str) -> int:
    found = schema.get(name)
    return found if isinstance(found, int) else 0


def _walk(root: Any, targets: _Targets) -> Iterator[tuple[_Path, Schema]]:
    """The schemas that something may have to obey: those in `root`, and those that references in them name."""
    seen: set[str] = set()
    waiting: deque[tuple[_Path, Any]] = deque([((), root)])
    while waiting:
        path, schema = waiting.popleft()
        for at, each in _schemas(schema, path, without=_UNUSED):
            yield at, each
            reference = each.get(_REF)
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.extend(filter(None, [targets.at(reference)]))


def _schemas(schema: Any, path: _Path = (), without: tuple[str, ...] = ()) -> Iterator[tuple[_Path, Schema]]:
    """`schema` and all schemas in it, outer ones first, with their places."""
    waiting: list[tuple[_Path, Any]] = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict):
            yield path, schema
            inner = [((*path, *name), each) for name, each in _inner(schema, without)]
            waiting += reversed(inner)


def _inner(schema: Schema, without: tuple[str, ...] = ()) -> Iterator[tuple[_Path, Any]]:
    """What stands directly in `schema` where a schema has to stand."""
    for name in _ONE:
        if name in schema and not isinstance(schema[name], list):
            yield (name,), schema[name]
    for name in _SEVERAL:
        yield from (((name, number), each) for number, each in enumerate(_listed(schema, name)))
    for name in _NAMED:
        if name not in without:
            yield from (((name, key), each) for key, each in _members(schema, name).items())


def _place(path: _Path) -> str:
    text = "".join(f"[{each}]" if isinstance(each, int) else _member(each) for each in path)
    half = _MAX_PLACE_CHARS // 2
    return text if len(text) <= _MAX_PLACE_CHARS else f"{text[:half]}...{text[-half:]}"


def _member(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name) and len(name) <= _MAX_SHOWN:
        return f".{name}"
    return f"[{name[:_MAX_SHOWN]!r}]"


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


_LENGTHS = ("minLength", "maxLength")
_SHAPES: Mapping[str, str] = {
    "f64": "a number",
    "positive integer": "a whole number from 0 on",
    "array": "an array",
    "object": "an object",
    "string": "a string",
}


def _of_keyword(_: Schema, found: re.Match[str]) -> _Said:
    name = found[1]
    return name, f"the keyword {name} cannot be enforced: {_INSTEAD.get(name, 'leave it out')}"


def _of_one_of(_: Schema, __: re.Match[str]) -> _Said:
    reason = "oneOf can be enforced only where its alternatives exclude each other by type or constant: write anyOf"
    return "oneOf", reason


def _of_reference(_: Schema, found: re.Match[str]) -> _Said:
    missing = found[1].removeprefix(f"/{_DEFINITIONS}/{_WHOLE}")
    return _REF, f"there is no schema {missing[:_MAX_SHOWN]!r} in this document"


def _of_address(part: Schema, found: re.Match[str]) -> _Said:
    name = _keyword_with(part, found[1])
    if found[0].startswith("Invalid"):
        return name, f"{found[1][:_MAX_SHOWN]!r} is no address"
    if name == "$schema":
        return name, "this dialect of JSON Schema is not known: leave it out"
    return name, "refers to another document, which is not fetched: put that schema into $defs"


def _keyword_with(part: Schema, address: str) -> str:
    """The keyword of `part` that names an address; llguidance has made a relative one whole. "" where none does."""
    for name in ("$schema", "$id", _REF):
        found = part.get(name)
        if isinstance(found, str) and (found == address or address.endswith(found.partition("#")[0] or address + ".")):
            return name
    return ""


def _of_format(_: Schema, __: re.Match[str]) -> _Said:
    return "format", f"the format is not known: {', '.join(FORMATS)} are. Write pattern, or leave it out"


def _of_expression(part: Schema, found: re.Match[str]) -> _Said:
    said, limit = _EXPRESSION.search(found.string), next((name for name in _LENGTHS if name in part), "")
    if said is None:
        return "", "an expression in it cannot be read"
    keyword = _with_expression(part, said[1])
    if limit and not keyword:  # llguidance makes an expression of it
        return limit, "is too large"
    return keyword, f"the expression {said[1][:_MAX_SHOWN]!r} cannot be read: {said[2]}"


def _with_expression(part: Schema, expression: str) -> str:
    pattern = part.get("pattern")
    is_pattern = isinstance(pattern, str) and expression in pattern
    is_name = any(expression in name for name in _members(part, "patternProperties"))
    return "pattern" if is_pattern else "patternProperties" if is_name else ""


def _of_look(part: Schema, found: re.Match[str]) -> _Said:
    reason = f"the expression {found[1][:_MAX_SHOWN]!r} looks at what stands around: write only what is to be written"
    return _with_expression(part, found[1]), reason


def _of_expressions(_: Schema, found: re.Match[str]) -> _Said:
    both = f"{found[1][:_MAX_SHOWN]} and {found[2][:_MAX_SHOWN]}"
    return "patternProperties", f"{both} may match the same name: make them exclude each other"


def _of_number_of_members(part: Schema, _: re.Match[str]) -> _Said:
    keyword = next((name for name in ("minProperties", "maxProperties") if name in part), "")
    return keyword, (
        "how many members there are can be enforced only where all of properties are required, or, with "
        "additionalProperties false, as none or one beside those that are required"
    )


def _of_type(_: Schema, found: re.Match[str]) -> _Said:
    return "type", f"{found[1][:_MAX_SHOWN]} is no type"


def _of_shape(part: Schema, found: re.Match[str]) -> _Said:
    return found[2], f"must be {'an array of strings' if found[3] else _SHAPES[found[1]]}"


def _of_list(_: Schema, found: re.Match[str]) -> _Said:
    return found[1], f"must be {found[2]}"


def _of_no_schema(part: Schema, _: re.Match[str]) -> _Said:
    name = next((str(path[0]) for path, each in _inner(part) if not isinstance(each, dict | bool)), "")
    return name, "a schema must be an object, true or false"


def _of_value(_: Schema, found: re.Match[str]) -> _Said:
    return found[1], found[2] or "is too large"


def _of_multiple(_: Schema, __: re.Match[str]) -> _Said:
    return "multipleOf", "must be above 0"


def _of_neighbours(_: Schema, __: re.Match[str]) -> _Said:
    return _REF, "leads back to where it stands, and other keywords beside it cannot be enforced: write them there"


def _of_number(_: Schema, __: re.Match[str]) -> _Said:
    return "", "a number in it is too large"


def _of_ways(_: Schema, __: re.Match[str]) -> _Said:
    return "", "there are too many ways to go on: require members, and have fewer alternatives"


def _unsatisfiable(part: Schema, _: re.Match[str]) -> _Said:
    keywords = [name for name in _CONTRADICTING if name in part]
    told = f": {', '.join(keywords)} contradict each other" if len(keywords) > 1 else ""
    return keywords[0] if len(keywords) == 1 else "", f"nothing obeys it{told}"


_REASONS: tuple[tuple[re.Pattern[str], Callable[[Schema, re.Match[str]], _Said]], ...] = tuple(
    (re.compile(pattern), explain)
    for pattern, explain in (
        (r'Unimplemented keys: \["([^"]+)"', _of_keyword),
        (r"oneOf constraints are not supported", _of_one_of),
        (r"(?:Pointer|Anchor) '(.*)' does not exist", _of_reference),
        (_ADDRESS.pattern, _of_address),
        (r"Unknown format: ", _of_format),
        (r"regex parse error", _of_expression),
        (r"lookarounds not supported yet; .* in regex /(.*)/", _of_look),
        (r"patternProperty regexes (.+) and (.+) are (?:not )?disjoint", _of_expressions),
        (r"min/maxProperties only supported", _of_number_of_members),
        (r"Invalid type: (.+)", _of_type),
        (r"Expected (f64|positive integer|string|array|object) for '(\w+)'( item)?, got ", _of_shape),
        (r"schema must be an object or boolean", _of_no_schema),
        (r"^(\$?\w+) must be (an? [a-z ]+)", _of_list),
        (r"Value for '(multipleOf)' (has too many digits)", _of_value),
        (r"(min\w+|max\w+) \(\d+\) exceeds the supported range()", _of_value),
        (r"invalid multiple of", _of_multiple),
        (r"circular references with sibling keys", _of_neighbours),
        (r"number out of range", _of_number),
        (r"Current row has \d+ items", _of_ways),
        (r"Unsatisfiable schema|NoExtensionBias|no text obeys the grammar", _unsatisfiable),
    )
)
"""What llguidance says, and how it is said to the author."""
