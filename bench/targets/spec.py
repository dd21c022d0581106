"""Targets as people write them: `NAME=URL`, `NAME=baton serve ...`, `NAME=COMMAND @ URL`.

Owns the grammar. Knows neither processes nor whether anything answers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.client.endpoint import checked_base_url
from baton.wire.errors import InvalidSetting

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BATON = ("baton", "serve")


@dataclass(frozen=True, slots=True)
class Target:
    """Something to measure.

    `command` is () for a server that runs already. `url` is "" for a Baton that is started on a free port.
    """

    name: str
    url: str
    command: tuple[str, ...] = ()

    @property
    def is_started(self) -> bool:
        return bool(self.command)

    @property
    def is_baton(self) -> bool:
        """Whether the command is `baton serve`; what answers at a bare URL is not known here."""
        return self.command[:2] == _BATON


def parse_target(text: str) -> Target:
    """One target. Raises `InvalidSetting`."""
    name, equals, rest = text.partition("=")
    written, at, url = rest.rpartition(" @ ")
    try:
        if not equals or not _NAME.fullmatch(name):
            raise InvalidSetting("expected NAME=URL or NAME=COMMAND, like pd='baton serve'")
        if re.match(r"https?://", rest.strip()):
            return Target(name, checked_base_url(rest.strip()))
        command = tuple(shlex.split(written if at else rest))
        if not command:
            raise InvalidSetting("there is no command")
        if at:
            return Target(name, checked_base_url(url.strip()), command)
        if command[:2] != _BATON:
            raise InvalidSetting("` @ URL` must say where the command answers")
        if any(word == "--port" or word.startswith("--port=") for word in command):
            raise InvalidSetting("a Baton with --port needs ` @ http://HOST:PORT` after it")
    except (InvalidSetting, ValueError) as error:
        raise InvalidSetting(f"--target {text!r:.200}: {error}") from None
    return Target(name, "", command)


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """All targets; no two have one name. Raises `InvalidSetting`."""
    targets = tuple(map(parse_target, texts))
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSetting(f"--target {name}: two targets have this name")
    return targets
