"""A whole result, made of outcomes as a run makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.bench.client.driver import ClientFigures, LoadRun
from baton.bench.client.outcome import Outcome
from baton.bench.serve.metrics import summarise
from baton.bench.serve.result import RunResult

CLIENT = ClientFigures(cpu_s=0.5, cpu_share=0.1, num_late=0)


def load_of(outcomes: Sequence[Outcome], **client: float) -> LoadRun:
    """A run of 5 s that had these outcomes."""
    return LoadRun(list(outcomes), 100.0, 105.0, dataclasses.replace(CLIENT, **client))  # type: ignore[arg-type]


def result_of(outcomes: Sequence[Outcome], duration_s: float = 5.0, **changes: Any) -> RunResult:
    """What a run of `duration_s` with these outcomes says; `slo` is {metric: ms}."""
    summary = {
        "date": "20260102-030405",
        "backend": "openai",
        "label": "openai",
        "model_id": "models/tiny",
        "request_rate": "inf",
        "max_concurrency": None,
        **summarise(outcomes, duration_s, changes.pop("slo", {})),
        "client": dataclasses.asdict(CLIENT),
        "breakdown": None,
        "dataset": {"name": "random"},
        "seed": 0,
        "facts": {},
        "notes": [],
    }
    return RunResult({**summary, **changes}, list(outcomes))
