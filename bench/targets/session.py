"""What `compare` and `sweep` do alike: read their settings, begin or go on with a file, start targets, and measure.

Owns the settings that are taken over from `baton bench serve`: all but those that are chosen for each load.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from bench.arguments import parse_settings
from bench.documents import CompareDocument, MeasuredTarget, SweepDocument, begun, save
from bench.facts import Facts, collect_facts
from bench.serve.measure import PACKAGES, run_serve_benchmark
from bench.serve.result import as_json
from bench.serve.settings import ServeBenchSettings, without_secrets
from bench.serve.settings import check as check_serve
from bench.targets.line_up import LineUp, TargetSettings, described
from bench.targets.spec import Target, parse_targets
from bench.workload.dataset_settings import DatasetSettings
from program.settings import as_flags

_CHOSEN = ("base_url", "host", "port", "request_rate", "repeat", "label", "ready_check_timeout_sec")
_CHOSEN_BEGINNINGS = ("ramp_up_", "save_", "append_", "result_")


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


def serve_flags() -> type[Any]:
    """`ServeBenchSettings` without what each load decides: such a flag is refused, not ignored."""
    hints = get_type_hints(ServeBenchSettings)
    fields = [
        (field.name, hints[field.name], dataclasses.field(default=field.default, metadata=field.metadata))
        for field in dataclasses.fields(ServeBenchSettings)
        if field.name not in _CHOSEN and not field.name.startswith(_CHOSEN_BEGINNINGS)
    ]
    return dataclasses.make_dataclass(ServeBenchSettings.__name__, fields, frozen=True)


def complete(part: Any) -> ServeBenchSettings:
    """Of an instance of `serve_flags()`."""
    return ServeBenchSettings(**{field.name: getattr(part, field.name) for field in dataclasses.fields(part)})


def measure_with(serve: ServeBenchSettings, dataset: DatasetSettings, say: Callable[[str], None]) -> Measure:
    """A `Measure` that runs `baton bench serve` with these settings."""

    def measure(load: Load) -> dict[str, Any]:
        settings = dataclasses.replace(serve, base_url=(load.url,), request_rate=load.rate)
        asked = dataclasses.replace(dataset, num_prompts=load.num_prompts, seed=load.seed)
        return as_json(run_serve_benchmark(settings, asked, say=say), load.is_detailed)

    return measure


def arguments_of(own: Any, serve: ServeBenchSettings, dataset: DatasetSettings) -> list[str]:
    """The arguments that measure this again: of the command's `own` settings, of the load's and of the dataset's."""
    chosen = dataclasses.replace(dataset, num_prompts=DatasetSettings().num_prompts)
    return [*as_flags(own), *as_flags(without_secrets(serve)), *as_flags(chosen)]


SESSION_STEP = 1_000_000
"""Between the seeds of sessions: what an earlier one sent is in no cache of a later one."""
_SettingsT = TypeVar("_SettingsT", bound=TargetSettings)
_DocumentT = TypeVar("_DocumentT", CompareDocument, SweepDocument)


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
    def path(self) -> Path | None:
        """The file of the result."""
        return Path(self.settings.json) if self.settings.json else None

    def described(self) -> list[MeasuredTarget]:
        """The targets before anything was started."""
        return [described(target) for target in self.targets]

    def begun(self, fresh: _DocumentT) -> _DocumentT:
        """What the file holds so far, else `fresh`. Raises `InvalidSetting`."""
        return begun(self.path, fresh, self.arguments, is_resumed=self.settings.resume)

    def save(self, document: CompareDocument | SweepDocument) -> None:
        """Write the file. Raises `InvalidSetting`."""
        save(self.path, document)

    def line_up(self) -> LineUp:
        """The targets, not started yet. Raises `InvalidSetting`."""
        return LineUp(self.targets, self.settings, self.say)

    def measure(self) -> Measure:
        """What carries out a load."""
        return measure_with(self.serve, self.dataset, self.say)


def read_session(
    command: str, usage: str, description: str, arguments: Sequence[str], settings_class: type[_SettingsT]
) -> Session[_SettingsT]:
    """The settings of `baton bench COMMAND`. Raises `InvalidSetting`; exits on unknown flags."""
    parser = argparse.ArgumentParser(
        prog=f"baton bench {command}",
        usage=f"baton bench {command} {usage} [options]",
        description=description,
        allow_abbrev=False,
    )
    settings, part, dataset = parse_settings(parser, arguments, settings_class, serve_flags(), DatasetSettings)
    serve = complete(part)
    check_serve(serve)
    measured = arguments_of(dataclasses.replace(settings, resume=True), serve, dataset)
    facts = collect_facts(shlex.join(["baton", "bench", command, *measured]), PACKAGES)
    return Session(settings, serve, dataset, parse_targets(settings.target), measured, facts, say)


def say(text: str) -> None:
    """Tell people what happens next."""
    sys.stderr.write(f"{text}\n")
