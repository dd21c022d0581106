"""What `compare` and `sweep` do alike: their settings and the file of their result, and one target measured at a time.

Owns which target runs and which is halted. Many a server spins while it has nothing to do, and would take the
machine from the one that is measured: such targets are halted until it is their turn. A flag of `baton bench serve`
that each load decides is refused, not ignored.
Invariant: when a `LineUp` is left, nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from baton.bench.arguments import parse_settings, say
from baton.bench.documents import CompareDocument, MeasuredTarget, SweepDocument, begun, save
from baton.bench.facts import Facts, collect_facts
from baton.bench.serve.command import PACKAGES, run_serve_benchmark
from baton.bench.serve.result import as_json
from baton.bench.serve.settings import LoadSettings, ServeBenchSettings, without_secrets
from baton.bench.serve.settings import check as check_serve
from baton.bench.targets.process import RunningTarget
from baton.bench.targets.spec import Target, parse_targets
from baton.bench.workload.dataset_settings import DatasetSettings
from baton.runtime.command_line import CommandParser
from baton.runtime.ranges import COUNT, COUNT_OR_NONE, SECONDS
from baton.runtime.settings import as_flags, setting
from baton.wire.errors import InvalidSetting

_GROUP = "targets"
SESSION_STEP = 1_000_000
"""Between the seeds of sessions: what an earlier one sent is in no cache of a later one."""


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is measured. A command adds to this how often, and at which rates."""

    target: tuple[str, ...] = setting(
        (),
        "what to measure: NAME=URL, NAME='baton serve ...', or NAME='COMMAND @ URL'; a comparison holds the others"
        " against the first",
        metavar="TARGET",
    )
    duration_s: float = setting(60.0, "seconds of each load", allowed=SECONDS)
    min_prompts: int = setting(20, "requests of each load at least", group=_GROUP, allowed=COUNT)
    num_prompts: int = setting(
        0, "requests of each load; 0: what --duration-s holds", group=_GROUP, allowed=COUNT_OR_NONE
    )
    start_timeout_s: float = setting(
        900.0, "seconds until a target that is started must answer", group=_GROUP, allowed=SECONDS
    )
    json: str = setting("", "file for the result, written after every load that counts", metavar="FILE")
    resume: bool = setting(True, "go on with --json when it is there; --no-resume begins anew", group=_GROUP)

    def num_prompts_at(self, rate: float) -> int:
        """Requests of one load: `num_prompts` if that is not 0, else what fills `duration_s`, at least `min_prompts`.

        Raises `InvalidSetting` for an infinite rate without `num_prompts`.
        """
        if self.num_prompts:
            return self.num_prompts
        if not math.isfinite(rate):
            raise InvalidSetting("an infinite rate needs --num-prompts: it has no duration")
        return max(self.min_prompts, math.ceil(rate * self.duration_s))


def check_targets(settings: TargetSettings, rates: Sequence[float]) -> None:
    """Raise `InvalidSetting` for what cannot be used."""
    if not settings.target:
        raise InvalidSetting("--target is needed, once for each thing to measure")
    for rate in rates:
        settings.num_prompts_at(rate)


def parse_rates(words: Sequence[str]) -> tuple[float, ...]:
    """Rates in requests/s of words like `1 2` or `1,2`, `inf` among them. Raises `InvalidSetting`."""
    found: list[float] = []
    for text in (text for word in words for text in word.split(",")):
        with contextlib.suppress(ValueError):
            found.append(float(text))
            if found[-1] > 0:
                continue
        raise InvalidSetting(f"--rates {text!r:.40} is not a rate above 0")
    if len(set(found)) < len(found):
        raise InvalidSetting(f"--rates {' '.join(words):.100}: a rate is there twice")
    return tuple(found)


class LineUp:
    """Context manager. All targets run from the beginning, so no start is measured, and some rest between their turns.

    Entering it raises `BatonError`.
    """

    def __init__(self, targets: Sequence[Target], settings: TargetSettings, say: Callable[[str], None]) -> None:
        self._targets = {target.name: target for target in targets}
        # a Baton rests by itself
        self._halted = {target.name for target in targets if target.is_started and not target.is_baton}
        self._settings = settings
        self._say = say
        self._stack = contextlib.ExitStack()
        self._running: dict[str, RunningTarget] = {}

    def __enter__(self) -> LineUp:
        with contextlib.ExitStack() as started:  # those that run already must not stay, not even after Ctrl-C
            started.callback(self._stack.close)
            for name in self._targets:
                running = RunningTarget(self._targets[name], self._settings.start_timeout_s, self._say)
                self._running[name] = self._stack.enter_context(running)
                if name in self._halted:
                    running.pause()
            started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_turn(self, name: str) -> RunningTarget:
        """The target, ready to be measured, with the others at rest. Raises `BatonError`."""
        for other in self._halted & self._running.keys() - {name}:
            self._running[other].pause()
        self._running[name].resume()
        return self._running[name]


_SettingsT = TypeVar("_SettingsT", bound=TargetSettings)
_DocumentT = TypeVar("_DocumentT", CompareDocument, SweepDocument)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send to `url` at `rate` per second (infinite: as the trace says, or all at once)."""

    url: str
    rate: float
    num_prompts: int
    seed: int
    is_detailed: bool = False


Measure = Callable[[Load], dict[str, Any]]
"""Carries out a load and returns the run's result as it is in a result file."""


@dataclass(frozen=True, slots=True)
class Session(Generic[_SettingsT]):
    """The settings of a command that measures targets, and the file of its result."""

    settings: _SettingsT
    serve: ServeBenchSettings
    dataset: DatasetSettings
    targets: tuple[Target, ...]
    arguments: list[str]
    facts: Facts
    say: Callable[[str], None]

    @property
    def measured(self) -> list[MeasuredTarget]:
        """The targets as the result names them."""
        return [MeasuredTarget(each.name, shlex.join(each.command), each.url) for each in self.targets]

    @property
    def path(self) -> Path | None:
        return Path(self.settings.json) if self.settings.json else None

    def begun(self, fresh: _DocumentT) -> _DocumentT:
        """What the file holds so far, else `fresh`. Raises `InvalidSetting`."""
        return begun(self.path, fresh, self.arguments, is_resumed=self.settings.resume)

    def save(self, document: CompareDocument | SweepDocument) -> None:
        """Write the file. Raises `InvalidSetting`."""
        save(self.path, document)

    def measure(self, load: Load) -> dict[str, Any]:
        """Carry out a load with `baton bench serve`; the run's result as it is in a result file."""
        settings = dataclasses.replace(self.serve, base_url=(load.url,), request_rate=load.rate)
        asked = dataclasses.replace(self.dataset, num_prompts=load.num_prompts, seed=load.seed)
        return as_json(run_serve_benchmark(settings, asked, say=self.say), load.is_detailed)


def read_session(
    command: str, usage: str, description: str, arguments: Sequence[str], settings_class: type[_SettingsT]
) -> Session[_SettingsT]:
    """The settings of `baton bench COMMAND`. Raises `InvalidSetting`; exits on unknown flags."""
    parser = CommandParser(
        prog=f"baton bench {command}", usage=f"baton bench {command} {usage} [options]", description=description
    )
    settings, of_load, dataset = parse_settings(parser, arguments, settings_class, LoadSettings, DatasetSettings)
    serve = ServeBenchSettings(**dataclasses.asdict(of_load))
    check_serve(serve)
    # what each load decides is no part of what is measured
    unloaded = dataclasses.replace(dataset, num_prompts=DatasetSettings().num_prompts)
    parts = (dataclasses.replace(settings, resume=True), without_secrets(serve), unloaded)
    measured = [word for part in parts for word in as_flags(part)]
    facts = collect_facts(shlex.join(["baton", "bench", command, *measured]), PACKAGES)
    return Session(settings, serve, dataset, parse_targets(settings.target), measured, facts, say)
