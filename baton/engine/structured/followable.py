"""Whether a model can follow a JSON schema to an end: what compiles, and yet has no answer.

Owns the references that never end, and the limit of members to choose from. Does not compile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from baton.engine.structured.schema_places import (
    REF,
    UNUSED,
    Fault,
    Path,
    References,
    Schema,
    listed,
    members,
    place_of,
    reference_of,
    required_of,
    schemas_in,
)

_SCALARS = ("string", "number", "integer", "boolean", "null")
MAX_OPTIONAL_MEMBERS = 490
"""llguidance gives up at 2,000 ways to go on, and has four for each of them."""


def unfollowable(schema: Any) -> Fault | None:
    """The first fault in `schema` that compiles and yet allows no answer, or None.

    One is a `$ref` of which no instance ever ends, because it leads back to itself whatever is chosen: a model that has
    begun one could write for ever, or nothing. Another is an object with too many members to choose from: no mask can
    be made of it.
    """
    references = References(schema)
    endings = _Endings(references)
    for path, each in _walk(schema, references):
        reference = reference_of(each)
        if reference is not None and not endings.ends(reference):
            reason = "leads back to itself in a circle that never ends: make what repeats optional, or allow null"
            return Fault(place_of((*path, REF)), reason)
        num_optional = len(members(each, "properties").keys() - required_of(each))
        if num_optional > MAX_OPTIONAL_MEMBERS:
            reason = f"{num_optional} members are not required, at most {MAX_OPTIONAL_MEMBERS} can be: add required"
            return Fault(place_of((*path, "properties")), reason)
    return None


class _Endings:
    """The references whose schemas have an instance that ends.

    That is the least fixed point: nothing ends before it is shown to, so a circle never does.
    """

    def __init__(self, references: References) -> None:
        self._known = references.known
        self._ending: set[str] = set()
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
                needed = filter(None, (reference_of(each) for _, each in schemas_in(self._known[reference])))
                waiting += [(reference, True), *((other, False) for other in needed)]
        return ordered

    def ends(self, reference: str) -> bool:
        """Whether something that is valid by the schema at `reference` ends."""
        return reference in self._ending or reference not in self._known

    def _ends(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return True
        reference = reference_of(schema)
        if reference is not None and not self.ends(reference):
            return False
        if not all(map(self._ends, listed(schema, "allOf"))):
            return False
        if any((found := listed(schema, name)) and not any(map(self._ends, found)) for name in ("anyOf", "oneOf")):
            return False
        return self._ends_by_type(schema)

    def _ends_by_type(self, schema: Schema) -> bool:
        found = schema.get("type")
        types = [found] if isinstance(found, str) else found if isinstance(found, list) else _SCALARS
        if any(each in _SCALARS for each in types) or "const" in schema or "enum" in schema:
            return True
        return ("object" in types and self._object_ends(schema)) or ("array" in types and self._array_ends(schema))

    def _object_ends(self, schema: Schema) -> bool:
        properties, others = members(schema, "properties"), self._others_end(schema)
        required = required_of(schema)
        if not all(self._ends(properties[name]) if name in properties else others for name in required):
            return False
        optional = (each for name, each in properties.items() if name not in required)
        return _number(schema, "minProperties") <= len(required) or others or any(map(self._ends, optional))

    def _others_end(self, schema: Schema) -> bool:
        """Whether there may be members beside `properties` that end."""
        others = (schema.get("additionalProperties"), *members(schema, "patternProperties").values())
        return any(each is not False and self._ends(each) for each in others)

    def _array_ends(self, schema: Schema) -> bool:
        count, first = _number(schema, "minItems"), listed(schema, "prefixItems")
        return all(map(self._ends, first[:count])) and (count <= len(first) or self._ends(schema.get("items")))


def _number(schema: Schema, name: str) -> int:
    found = schema.get(name)
    return found if isinstance(found, int) else 0


def _walk(root: Any, references: References) -> Iterator[tuple[Path, Schema]]:
    """The schemas that something may have to obey: those in `root`, and those that references in them name."""
    seen: set[str] = set()
    waiting: deque[tuple[Path, Any]] = deque([((), root)])
    while waiting:
        path, schema = waiting.popleft()
        for at, each in schemas_in(schema, path, without=UNUSED):
            yield at, each
            reference = reference_of(each)
            if reference is not None and reference not in seen:
                seen.add(reference)
                waiting.extend(filter(None, [references.at(reference)]))
