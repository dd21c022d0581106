"""The command line of a benchmark: its settings from flags and from the file of `--config`.

Not from the environment: the command that stands beside a result has to say it all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from engine.api.settings import add_flags, check_file_keys, resolve


def parse_settings(parser: argparse.ArgumentParser, arguments: Sequence[str], *classes: type[Any]) -> tuple[Any, ...]:
    """One instance of each class, in their order. Raises `InvalidSetting`; exits on unknown flags."""
    add_flags(parser, *classes)
    flags = parser.parse_args(arguments)
    if flags.config:
        check_file_keys(flags.config, *classes)
    return tuple(resolve(settings_class, flags, {}) for settings_class in classes)
