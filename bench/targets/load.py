"""One load on one target, as `compare` and `sweep` ask for it, and how `baton bench serve` carries it out.

Owns the settings that are taken over from `baton bench serve`: all but those that are chosen for each load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from bench.serve.measure import run_serve_benchmark
from bench.serve.result import as_json
from bench.serve.settings import ServeBenchSettings, without_secrets
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
