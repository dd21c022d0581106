"""Reads members of a JSON document and says which one is missing, and where. Knows no kind of result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from wire.errors import InvalidSetting

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Reader:
    """A map of a document: `origin` is the file, `place` the way into it. Every method raises `InvalidSetting`."""

    origin: str
    place: str
    members: Mapping[str, Any]

    def text(self, key: str) -> str:
        """A string that has to be there."""
        return self._typed(key, str, "text")

    def text_or(self, key: str, default: str = "") -> str:
        """A string, or `default` where it is missing or null."""
        return default if self.members.get(key) is None else self.text(key)

    def number(self, key: str) -> float:
        """A finite number that has to be there."""
        value = self._typed(key, (int, float), "a number")
        if isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A number, or None where it is missing or null."""
        return None if self.members.get(key) is None else self.number(key)

    def rate(self, key: str) -> float:
        """A rate in 1/s above 0; "inf" is infinite."""
        if self.members.get(key) == "inf":
            return math.inf
        value = self.number(key)
        if value <= 0:
            raise self.wrong(key, "a rate above 0")
        return value

    def child(self, key: str) -> Reader:
        """A map that has to be there."""
        return Reader(self.origin, self._way(key), self._typed(key, dict, "a map"))

    def children(self, key: str) -> list[Reader]:
        """A list of maps that has to be there."""
        values: list[Any] = self._typed(key, list, "a list")
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.wrong(f"{key}[{number}]", "a map")
        return [Reader(self.origin, self._way(f"{key}[{number}]"), value) for number, value in enumerate(values)]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where it is missing."""
        values = self.members.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of texts")
        return tuple(values)

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers that has to be there."""
        values: list[Any] = self._typed(key, list, "a list")
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise self.wrong(key, "a list of numbers")
        return values

    def wrong(self, key: str, expected: str) -> InvalidSetting:
        """The error for a member that is not what it should be."""
        return InvalidSetting(f"{self.origin}: {self._way(key)} is not {expected}")

    def missing(self, key: str) -> InvalidSetting:
        """The error for a member that is not there."""
        return InvalidSetting(f"{self.origin}: {self._way(key)} is missing")

    def _way(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _typed(self, key: str, kind: type[_T] | tuple[type[_T], ...], expected: str) -> _T:
        if key not in self.members:
            raise self.missing(key)
        value = self.members[key]
        if not isinstance(value, kind):
            raise self.wrong(key, expected)
        return value
