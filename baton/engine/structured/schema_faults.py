"""What is wrong with a JSON schema, in the words of its author: the place in it, and what to write instead.

Owns what is told for each reason of llguidance, and how the schema at fault is found: the innermost one that is refused
by itself. Does not compile: `baton.engine.structured.vocabulary` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias
from urllib.parse import quote

from baton.engine.structured.schema_places import (
    REF,
    UNUSED,
    Fault,
    Path,
    References,
    Schema,
    inner_schemas,
    members,
    place_of,
    reference_of,
    schemas_in,
)
from baton.engine.text.answers.grammars import moved_references

_CONTRADICTING = (
    "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "prefixItems", "items", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
    "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", REF,
)  # fmt: skip
_EXPRESSION = re.compile(r"regex parse error:\n\s*(.+)\n(?:.*\n)*error: (.+)")
_ADDRESS = re.compile(r"(?:Resource|Invalid URI reference) '(.*)'(?: is not present in a registry|: )")
_MAX_SHOWN = 60

_Said: TypeAlias = tuple[str, str]
"""The keyword at fault, "" for none, and the reason."""
_ROOT: Path = ()
_DEFINITIONS, _WHOLE = "$defs", "whole"
_MAX_TRIES, _MAX_TRIED_CHARS = 256, 2**21
"""What is compiled to find the schema at fault: so many schemas, and so many characters of whole ones in all."""


def explained(schema: Schema, reason: str, reason_against: Callable[[Schema], str]) -> Fault:
    """The words of llguidance about `schema`, for its author. `reason_against`: what it says of another schema, "" when
    it takes it."""
    path, part, reason = _innermost(schema, reason, reason_against)
    keyword, told = _said(part, reason) or ("", "it cannot be enforced: say it by fewer or other keywords")
    return Fault(place_of((*path, keyword) if keyword in part else path), told)


def in_plain_words(reason: str) -> str:
    """The words of llguidance about a grammar that is no schema."""
    said = _said({}, reason)
    return reason if said is None else said[1]


def _said(part: Schema, reason: str) -> _Said | None:
    """None: it is not known what `reason` means."""
    for pattern, explain in _REASONS:
        found = pattern.search(reason)
        if found is not None:
            return explain(part, found)
    return None


def _innermost(root: Schema, reason: str, reason_against: Callable[[Schema], str]) -> tuple[Path, Schema, str]:
    """The schema within `root` that is at fault by itself while none in it is, and what is said of it."""
    address = _ADDRESS.match(reason)
    if address is not None:  # all addresses are looked at, wherever they stand, so all schemas seem to be at fault
        path, part = next((found for found in schemas_in(root) if _keyword_with(found[1], address[1])), (_ROOT, root))
        return path, part, reason
    references, moved = References(root), moved_references(root, f"#/$defs/{_WHOLE}")
    part, path, seen = root, _ROOT, {_ROOT}
    left = min(_MAX_TRIES, _MAX_TRIED_CHARS // len(json.dumps(root)))
    waiting = _parts(root, path, references, reason)
    while left and (found := next(waiting, None)) is not None:
        inner_path, inner = found
        if inner_path not in seen:
            seen.add(inner_path)
            left -= 1
            pointer = "/".join(quote(str(name).replace("~", "~0").replace("/", "~1")) for name in inner_path)
            against = reason_against({REF: f"#/$defs/{_WHOLE}/{pointer}", _DEFINITIONS: {_WHOLE: moved}})
            if against:
                path, part, reason = inner_path, inner, against
                waiting = _parts(part, path, references, reason)
    return path, part, reason


def _parts(schema: Schema, path: Path, references: References, reason: str) -> Iterator[tuple[Path, Schema]]:
    """The schemas that stand in `schema`, and the one that it refers to, as far as `reason` may be about them."""
    keyword = (_said({}, reason) or ("",))[0]
    for name, each in inner_schemas(schema, without=UNUSED):
        text = json.dumps(each) if keyword else ""
        if isinstance(each, dict) and (f'"{keyword}"' in text or f'"{REF}"' in text or not keyword):
            yield (*path, *name), each
    reference = reference_of(schema)
    found = None if reference is None else references.at(reference)
    if found is not None and isinstance(found[1], dict):
        yield found


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
    return REF, f"there is no schema {missing[:_MAX_SHOWN]!r} in this document"


def _of_address(part: Schema, found: re.Match[str]) -> _Said:
    name = _keyword_with(part, found[1])
    if found[0].startswith("Invalid"):
        return name, f"{found[1][:_MAX_SHOWN]!r} is no address"
    if name == "$schema":
        return name, "this dialect of JSON Schema is not known: leave it out"
    return name, "refers to another document, which is not fetched: put that schema into $defs"


def _keyword_with(part: Schema, address: str) -> str:
    """The keyword of `part` that names an address; llguidance has made a relative one whole. "" where none does."""
    for name in ("$schema", "$id", REF):
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
    is_name = any(expression in name for name in members(part, "patternProperties"))
    return "pattern" if is_pattern else "patternProperties" if is_name else ""


def _of_look(part: Schema, found: re.Match[str]) -> _Said:
    reason = f"the expression {found[1][:_MAX_SHOWN]!r} looks at what stands around: write only what is to be written"
    return _with_expression(part, found[1]), reason


def _of_expressions(_: Schema, found: re.Match[str]) -> _Said:
    both = f"{found[1][:_MAX_SHOWN]} and {found[2][:_MAX_SHOWN]}"
    return "patternProperties", f"{both} may match the same name: make them exclude each other"


def _of_member_count(part: Schema, _: re.Match[str]) -> _Said:
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
    name = next((str(path[0]) for path, each in inner_schemas(part) if not isinstance(each, dict | bool)), "")
    return name, "a schema must be an object, true or false"


def _of_value(_: Schema, found: re.Match[str]) -> _Said:
    return found[1], found[2] or "is too large"


def _of_multiple(_: Schema, __: re.Match[str]) -> _Said:
    return "multipleOf", "must be above 0"


def _of_neighbours(_: Schema, __: re.Match[str]) -> _Said:
    return REF, "leads back to where it stands, and other keywords beside it cannot be enforced: write them there"


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
        (r"min/maxProperties only supported", _of_member_count),
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
