"""JSON that people hand in, checked against a type: what does not fit is an `InvalidSetting` that says where it is."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from wire.errors import InvalidSetting

_T = TypeVar("_T")
_MAX_SHOWN = 60


def checked(kind: type[_T], value: Any, where: str) -> _T:
    """`value` as a `kind` (a dataclass, or any other type); members that it does not know are dropped.

    Raises `InvalidSetting`, which begins with `where` and the way to the member.
    """
    try:
        found: _T = _adapter(cast("Hashable", kind)).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        way = ".".join(map(str, first["loc"])).replace(".function-after", "")
        shown = "" if first["type"] == "missing" else f", found {first['input']!r:.{_MAX_SHOWN}}"
        raise InvalidSetting(": ".join(filter(None, (where, way, f"{first['msg']}{shown}")))) from None
    return found


def read_text(path: Path, where: str) -> str:
    """The text of a file. Raises `InvalidSetting`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{where}: {getattr(error, 'strerror', None) or 'this is not text'}") from None


def parse_json(text: str, where: str) -> Any:
    """Raises `InvalidSetting`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{where}: it is not JSON: {error}") from None


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Any]", kind))
