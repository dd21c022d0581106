"""Helpers: a line-up without processes, loads without requests, and sessions that keep what they save."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from baton.bench.documents import CompareDocument, SweepDocument
from baton.bench.targets.line_up import LineUp, Load, Session, TargetSettings, read_session
from baton.bench.targets.process import RunningTarget
from tests.bench.compare.results import result

_SettingsT = TypeVar("_SettingsT", bound=TargetSettings)


@dataclass
class FakeLineUp:
    """Every target's URL is `fake:NAME`."""

    turns: list[str] = field(default_factory=list)

    def as_line_up(self) -> LineUp:
        return cast("LineUp", self)

    def take_turn(self, name: str) -> RunningTarget:
        self.turns.append(name)
        return cast("RunningTarget", SimpleNamespace(url=f"fake:{name}"))


@dataclass
class FakeMeasure:
    """`milliseconds_of` a load is every latency of its run, `attainment_of` what it attains. Notes what it is asked."""

    milliseconds_of: Callable[[Load], float] = lambda _: 100.0
    attainment_of: Callable[[Load], float | None] = lambda _: 1.0
    ends_after: int | None = None
    asked: list[Load] = field(default_factory=list)

    def __call__(self, load: Load) -> dict[str, Any]:
        if len(self.asked) == self.ends_after:
            raise KeyboardInterrupt
        self.asked.append(load)
        found = result(self.milliseconds_of(load), attainment=self.attainment_of(load))
        return {**found, "ttfts": [0.1]} if load.is_detailed else found


@dataclass(frozen=True)
class FakeSession(Session[_SettingsT]):
    """Copies of what was saved, newest last."""

    saved: list[Any] = field(default_factory=list)

    def save(self, document: CompareDocument | SweepDocument) -> None:
        self.saved.append(copy.deepcopy(document))


def fake_session(settings_class: type[_SettingsT], *arguments: str) -> FakeSession[_SettingsT]:
    """Of targets `a` and `b`."""
    targets = ("--target", "a=http://fake:1", "b=http://fake:2")
    found = read_session("x", "", "", [*targets, *arguments], settings_class)
    return FakeSession(**{name: getattr(found, name) for name in Session.__slots__} | {"say": lambda _: None})
