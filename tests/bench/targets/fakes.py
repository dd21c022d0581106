"""Helpers: a line-up without processes, and loads without requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bench.targets.load import Load
from bench.targets.process import RunningTarget
from tests.bench.compare.results import result


@dataclass
class FakeRunning:
    url: str


@dataclass
class FakeLineUp:
    """Every target's URL is `fake:NAME`. From look to look the first uses a second of CPU time, the second two, ..."""

    names: Sequence[str]
    turns: list[str] = field(default_factory=list)
    num_looks: int = 0

    def __enter__(self) -> FakeLineUp:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def take_turn(self, name: str) -> RunningTarget:
        self.turns.append(name)
        return cast("RunningTarget", FakeRunning(f"fake:{name}"))

    def cpu_seconds(self) -> dict[str, float]:
        self.num_looks += 1
        return {name: float(self.num_looks * place) for place, name in enumerate(self.names, 1)}

    def describe(self) -> list[dict[str, Any]]:
        return [{"name": name, "command": f"run {name}", "pinning": ["it on 0"]} for name in self.names]


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
