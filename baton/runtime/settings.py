"""Settings: one frozen dataclass per component; flags, environment names and file keys come from its fields.

Owns the mapping field -> `--flag-name`, `BATON_FLAG_NAME`, `flag_name:` in a YAML file. A flag beats the environment,
which beats the file, which beats the default. Does not know any component.
A field of type `tuple[X, ...]` takes several values: `--name A B` or `--name A --name B`, words as a shell splits them
in the environment, a list in the file. An empty word stands for no value.
Invariant: a value that cannot be used is an `InvalidSetting` that names its origin; nothing is silently ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from baton.runtime.command_line import CommandParser
from baton.runtime.plugins import installed
from baton.runtime.ranges import ANY, Range
from baton.wire.errors import InvalidSetting

ENVIRONMENT_PREFIX = "BATON_"
_NEGATIVE = "no_"
_END_OF_FLAGS = "--"
_NUMBERS = (int, float)
_SettingsT = TypeVar("_SettingsT")


def setting(
    default: Any,
    doc: str,
    *,
    choices: Sequence[str] | None = None,
    plugins: str = "",
    positional: bool = False,
    group: str = "",
    metavar: str = "",
    short: str = "",
    allowed: Range = ANY,
    secret: bool = False,
) -> Any:
    """A field of a settings dataclass: its default and its one line of documentation.

    `plugins`: the group of entry points whose names are choices too (`baton.runtime.plugins`). `positional` makes it an
    optional positional argument (the model of `baton serve MODEL`). `group` is the one that `--help GROUP` shows; "":
    `--help` alone does. `metavar` is what stands for its value there; "": the type's name. `short` is another name of
    its flag. `allowed`: of numbers, each of a tuple's too. `secret`: it is not shown, and reaches other programs in
    their environment.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "plugins": plugins,
        "positional": positional,
        "group": group,
        "metavar": metavar,
        "short": short,
        "allowed": allowed,
        "secret": secret,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def add_flags(parser: CommandParser, *classes: type[Any]) -> None:
    """Add one flag per field of `classes` (a field two classes share is added once), and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, keys spelled as the flags")
    seen: set[str] = set()
    for settings_class in classes:
        for field, hint in _fields(settings_class):
            if field.name not in seen:
                seen.add(field.name)
                _add_flag(parser.group(field.metadata["group"]), field, hint)


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any) -> None:
    kind, is_tuple = _kind(hint)
    allowed = f"; {field.metadata['allowed']}" if kind in _NUMBERS else ""
    help_text = f"{field.metadata['doc']} (default: {_shown_default(field.default)}{allowed})".replace("%", "%%")
    if field.metadata["positional"]:
        parser.add_argument(field.name, nargs="*" if is_tuple else "?", default=None, help=help_text)
        return
    flag = f"--{field.name.replace('_', '-')}"
    if kind is bool and field.name.startswith(_NEGATIVE):
        # BooleanOptionalAction takes every `--no-` for a negation, this one too
        parser.add_argument(flag, action="store_const", const=True, default=None, help=help_text)
        return
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        return
    choices = field.metadata["choices"]
    shown = (*choices, "NAME") if choices and field.metadata["plugins"] else choices
    metavar = field.metadata["metavar"] or ("{" + ",".join(shown) + "}" if shown else kind.__name__.upper())
    if is_tuple:
        parser.add_argument(flag, action="extend", nargs="+", default=None, metavar=metavar, help=help_text)
    else:
        names = filter(None, (flag, field.metadata["short"]))
        parser.add_argument(*names, default=None, metavar=metavar, help=help_text)


def resolve(
    settings_class: type[_SettingsT], flags: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> _SettingsT:
    """Build `settings_class` from parsed flags, the environment, and the file that `--config` names.

    Raises `InvalidSetting` for unknown file keys and for values of the wrong type or outside the choices.
    """
    environment = os.environ if environment is None else environment
    from_file = read_file(flags.config) if flags.config else {}
    values: dict[str, Any] = {}
    for field, hint in _fields(settings_class):
        flag, variable = f"--{field.name.replace('_', '-')}", ENVIRONMENT_PREFIX + field.name.upper()
        given = vars(flags).get(field.name)
        if given is not None and given != []:
            values[field.name] = _convert(given, field, hint, flag)
        elif variable in environment:
            values[field.name] = _convert(environment[variable], field, hint, variable)
        elif field.name in from_file:
            values[field.name] = _convert(from_file[field.name], field, hint, f"{flags.config}: {field.name}")
    return settings_class(**values)


def require_allowed(settings: Any) -> None:
    """Raise `InvalidSetting` for a number that its field does not allow: for settings that nothing was parsed into."""
    for field in dataclasses.fields(settings):
        _require_allowed(getattr(settings, field.name), field, f"--{field.name.replace('_', '-')}")


def read_file(path: str) -> dict[str, Any]:
    """Keys of a YAML settings file, dashes turned to underscores. Raises `InvalidSetting`."""
    import yaml  # only runs that name a file pay for it

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSetting(f"--config {path}: {error}") from None
    if not isinstance(content, dict):
        raise InvalidSetting(f"--config {path}: expected a map of settings")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def check_file_keys(path: str, *classes: type[Any]) -> None:
    """Raise `InvalidSetting` when the file names a setting that none of `classes` has."""
    known = {field.name for settings_class in classes for field in dataclasses.fields(settings_class)}
    for key in read_file(path):
        if key not in known:
            raise InvalidSetting(f"--config {path}: unknown setting {key!r}")


def as_flags(settings: Any) -> list[str]:
    """The command-line arguments that rebuild `settings`, apart from secrets: what a launcher passes to its child."""
    arguments: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value == field.default or value is None or field.metadata["secret"]:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        words = value if isinstance(value, tuple) else (value,)
        if field.metadata["positional"]:
            arguments[0:0] = map(str, words)
        elif isinstance(value, tuple):
            arguments += [f"{flag}={word}" for word in words or ("",)]
        elif isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def secret_environment(settings: Any) -> dict[str, str]:
    """What a launcher adds to the environment of its child, beside `as_flags`."""
    secrets = [field.name for field in dataclasses.fields(settings) if field.metadata["secret"]]
    return {f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name in secrets if (value := getattr(settings, name))}


def _fields(settings_class: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(settings_class)
    return [(field, hints[field.name]) for field in dataclasses.fields(settings_class)]


def _kind(hint: Any) -> tuple[Any, bool]:
    """(X, False) of `X` and of `X | None`; (X, True) of `tuple[X, ...]`."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(member for member in get_args(hint) if member is not type(None))
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def _shown_default(default: Any) -> str:
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    return "none" if default is None or default == "" else str(default)


def _convert(value: Any, field: dataclasses.Field[Any], hint: Any, origin: str) -> Any:
    kind, is_tuple = _kind(hint)
    if is_tuple:
        return tuple(_convert_one(word, field, kind, origin) for word in _words(value, origin) if word != "")
    return _convert_one(value, field, kind, origin)


def _words(value: Any, origin: str) -> Sequence[Any]:
    if isinstance(value, list):
        return value
    try:
        return shlex.split(value) if isinstance(value, str) else [value]
    except ValueError as error:
        raise InvalidSetting(f"{origin}: {value!r:.100}: {error}") from None


def _convert_one(value: Any, field: dataclasses.Field[Any], kind: type[Any], origin: str) -> Any:
    if value == _END_OF_FLAGS:  # argparse would drop it on its way to another program
        raise InvalidSetting(f"{origin}: {_END_OF_FLAGS!r} is no value")
    converted = _convert_bool(value) if kind is bool else _convert_scalar(value, kind)
    if converted is None:
        raise InvalidSetting(f"{origin}: {value!r:.100} is not of type {kind.__name__}")
    choices = field.metadata["choices"]
    if choices and converted not in choices and converted not in (others := installed(field.metadata["plugins"])):
        raise InvalidSetting(f"{origin}: {value!r:.100} is not one of {', '.join((*choices, *others))}")
    _require_allowed(converted, field, origin)
    return converted


def _require_allowed(value: Any, field: dataclasses.Field[Any], origin: str) -> None:
    allowed = field.metadata["allowed"]
    if type(value) in _NUMBERS and value not in allowed:
        raise InvalidSetting(f"{origin}: {value} is not {allowed}")


def _convert_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(str(value).lower())


def _convert_scalar(value: Any, kind: type[Any]) -> Any:
    """None when `value` does not say a `kind` exactly: 4.5 is no int, and only numbers and strings are strings."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        converted = kind(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return converted if isinstance(value, str) or kind is str or converted == value else None
