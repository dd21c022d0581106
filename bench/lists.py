"""Flags that take a list, like `1,8,64` or `shm,zmq`. Knows no benchmark."""

from __future__ import annotations

import os
from collections.abc import Sequence

from wire.errors import InvalidSetting


def items(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(filter(None, (item.strip() for item in text.split(","))))


def numbers(text: str, flag: str, lowest: int = 1) -> tuple[int, ...]:
    """At least one number, none below `lowest`. Raises `InvalidSetting`."""
    found = items(text)
    if not found or not all(item.isdecimal() and int(item) >= lowest for item in found):
        raise InvalidSetting(f"{flag}: {text!r:.40} is not a list of numbers from {lowest} on")
    return tuple(map(int, found))


def names(text: str, flag: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Some of `choices`, each once, in the order of `text`; () for none. Raises `InvalidSetting`."""
    for name in items(text):
        if name not in choices:
            raise InvalidSetting(f"{flag} {name!r:.40} is not one of {', '.join(choices)}")
    return tuple(dict.fromkeys(items(text)))


def cores(text: str, flag: str = "--cores") -> tuple[int, ...]:
    """Cores of this process; "" stands for all of them. Raises `InvalidSetting`."""
    available = sorted(os.sched_getaffinity(0))
    given = numbers(text, flag, lowest=0) if text else tuple(available)
    if not set(given) <= set(available):
        raise InvalidSetting(f"{flag} {text} are not some of {', '.join(map(str, available))}")
    return given
