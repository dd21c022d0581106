"""What people hand in: the settings of a benchmark from flags and from the file of `--config`, and JSON of any type.

Settings do not come from the environment: the command that stands beside a result has to say it all. What does not fit
is an `InvalidSetting` that says where it is.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from program.settings import add_flags, check_file_keys, resolve
from wire.errors import InvalidSetting

_SettingsT = TypeVar("_SettingsT")
_T = TypeVar("_T")
_MAX_SHOWN = 60


def parse_alone(prog: str, description: str, arguments: Sequence[str], settings_class: type[_SettingsT]) -> _SettingsT:
    """The settings of a benchmark that has one class of them. Raises and exits as `parse_settings`."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    settings: _SettingsT
    (settings,) = parse_settings(parser, arguments, settings_class)
    return settings


def parse_settings(parser: argparse.ArgumentParser, arguments: Sequence[str], *classes: type[Any]) -> tuple[Any, ...]:
    """One instance of each class, in their order. Raises `InvalidSetting`; exits on unknown flags."""
    add_flags(parser, *classes)
    flags = parser.parse_args(arguments)
    if flags.config:
        check_file_keys(flags.config, *classes)
    return tuple(resolve(settings_class, flags, {}) for settings_class in classes)


def require_at_least(settings: Any, **lowest: float) -> None:
    """Raise `InvalidSetting` for a setting below its `lowest` value; None is no value."""
    for name, limit in lowest.items():
        value = getattr(settings, name)
        if value is not None and not value >= limit:
            raise InvalidSetting(f"{_flag(name)} {value} is not at least {limit}")


def require_above_zero(settings: Any, *names: str) -> None:
    """Raise `InvalidSetting` for a setting of `names` that is not above 0; None is no value."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise InvalidSetting(f"{_flag(name)} {value} is not above 0")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
