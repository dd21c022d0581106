"""The command line of a benchmark: its settings from flags and from the file of `--config`, and the limits of numbers.

Not from the environment: the command that stands beside a result has to say it all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

from program.settings import add_flags, check_file_keys, resolve
from wire.errors import InvalidSetting

_SettingsT = TypeVar("_SettingsT")


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
