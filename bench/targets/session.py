"""What `compare` and `sweep` do alike: read their settings, begin or go on with a file, start targets, and measure.

A flag of `baton bench serve` that each load decides is refused, not ignored.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.arguments import parse_settings
from bench.documents import CompareDocument, SweepDocument, begun, save
from bench.facts import Facts, collect_facts
from bench.serve.command import PACKAGES, run_serve_benchmark, say
from bench.serve.result import as_json
from bench.serve.settings import LoadSettings, ServeBenchSettings, without_secrets
from bench.serve.settings import check as check_serve
from bench.targets.line_up import TargetSettings
from bench.targets.spec import Target, parse_targets
from bench.workload.dataset_settings import DatasetSettings
from program.settings import as_flags

SESSION_STEP = 1_000_000
"""Between the seeds of sessions: what an earlier one sent is in no cache of a later one."""
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
    parser = argparse.ArgumentParser(
        prog=f"baton bench {command}",
        usage=f"baton bench {command} {usage} [options]",
        description=description,
        allow_abbrev=False,
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
