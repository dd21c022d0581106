"""Dates and times of a schema that exist: llguidance knows their form, but not that only some years have a February 29,
that there is no year 0, and that nobody means a leap second.

Owns the patterns, which are added beside the `format` of a schema.
"""

from __future__ import annotations

from typing import Any

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"({_LEAP_YEAR}-02-29|{_YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8])))"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_PATTERNS = {"date": f"^{_DATE}", "time": f"^{_TIME}", "date-time": f"^{_DATE}[tT]{_TIME}"}
_VALUES = ("const", "enum", "default", "examples")
"""Members that hold values, not schemas."""


def with_real_dates(schema: Any) -> Any:
    """`schema` with its dates and times limited to those that exist. Raises `RecursionError` when it is too deep."""
    if isinstance(schema, list):
        return [with_real_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: each if name in _VALUES else with_real_dates(each) for name, each in schema.items()}
    form = schema.get("format")
    if isinstance(form, str) and form in _PATTERNS and isinstance(schema.get("allOf", []), list):
        found["allOf"] = [*found.get("allOf", []), {"pattern": _PATTERNS[form]}]
    return found
