"""The command line of a benchmark: its settings from flags and from the file of `--config`.

Not from the environment: the command that stands beside a result has to say it all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

from program.settings import add_flags, check_file_keys, resolve

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
