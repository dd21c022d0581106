"""What people hand in: settings from flags and the file of `--config`, JSON of any type; what they are told, and the
files they ask for.

Settings do not come from the environment: the command that stands beside a result has to say it all. What does not fit
is an `InvalidSetting` that says where it is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from baton.runtime.command_line import CommandParser
from baton.runtime.settings import add_flags, check_file_keys, resolve
from baton.wire.errors import InvalidSetting

_SettingsT = TypeVar("_SettingsT")
_T = TypeVar("_T")
_MAX_SHOWN = 60


def parse_alone(prog: str, description: str, arguments: Sequence[str], settings_class: type[_SettingsT]) -> _SettingsT:
    """The settings of a benchmark that has one class of them. Raises and exits as `parse_settings`."""
    parser = CommandParser(prog=prog, description=description)
    settings: _SettingsT
    (settings,) = parse_settings(parser, arguments, settings_class)
    return settings


def parse_settings(parser: CommandParser, arguments: Sequence[str], *classes: type[Any]) -> tuple[Any, ...]:
    """One instance of each class, in their order. Raises `InvalidSetting`; exits on unknown flags."""
    add_flags(parser, *classes)
    flags = parser.parse(arguments)
    if flags.config:
        check_file_keys(flags.config, *classes)
    return tuple(resolve(settings_class, flags, {}) for settings_class in classes)


def _items(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (item.strip() for item in text.split(","))))


def numbers_in(text: str, flag: str, lowest: int = 1) -> tuple[int, ...]:
    """At least one number, none below `lowest`. Raises `InvalidSetting`."""
    found = _items(text)
    if not found or not all(item.isdecimal() and int(item) >= lowest for item in found):
        raise InvalidSetting(f"{flag}: {text!r:.40} is not a list of numbers from {lowest} on")
    return tuple(map(int, found))


def names_in(text: str, flag: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Some of `choices`, each once, in the order of `text`; () for none. Raises `InvalidSetting`."""
    for name in _items(text):
        if name not in choices:
            raise InvalidSetting(f"{flag} {name!r:.40} is not one of {', '.join(choices)}")
    return tuple(dict.fromkeys(_items(text)))


def cores_in(text: str, flag: str = "--cores") -> tuple[int, ...]:
    """Cores of this process; "" stands for all of them. Raises `InvalidSetting`."""
    available = sorted(os.sched_getaffinity(0))
    given = numbers_in(text, flag, lowest=0) if text else tuple(available)
    if not set(given) <= set(available):
        raise InvalidSetting(f"{flag} {text} are not some of {', '.join(map(str, available))}")
    return given


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


def say(text: str) -> None:
    """What happens next, for people."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def require_folder(path: str | Path, flag: str = "--json") -> None:
    """Raise `InvalidSetting` when there is no folder for the file that `flag` names; "" names none."""
    if path != "" and not Path(path).absolute().parent.is_dir():
        raise InvalidSetting(f"{flag} {path}: there is no such folder")


def write_json(path: str | Path, document: Any, flag: str = "--json") -> None:
    """Write the file that `flag` names. Raises `InvalidSetting` when that does not work."""
    write_file(Path(path), json.dumps(document, allow_nan=False) + "\n", f"{flag} ")


def write_file(path: Path, content: str | bytes, origin: str = "", *, makes_folder: bool = False) -> Path:
    """Write `path`; `origin` stands before it in an error. Raises `InvalidSetting` when that does not work."""
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidSetting(f"{origin}{path}: {error.strerror}") from None
    return path


@functools.cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Any]", kind))
