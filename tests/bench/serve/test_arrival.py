from __future__ import annotations

from typing import Any

import pytest

from baton.bench.serve.arrivals import arrivals_of, process_of
from baton.bench.serve.settings import ServeBenchSettings
from baton.bench.workload.dataset_settings import DatasetSettings, Prompt
from baton.wire.errors import InvalidSetting

PROMPTS = [Prompt((1, 2), "", 4, arrival_s) for arrival_s in (10.0, 11.0, 13.0)]
RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0}


@pytest.mark.parametrize(
    ("changes", "dataset_name", "process"),
    [
        ({}, "random", "all at once"),
        ({"max_concurrency": 4}, "random", "closed loop"),
        ({"request_rate": 2.0}, "random", "poisson"),
        ({"request_rate": 2.0, "max_concurrency": 4}, "random", "poisson"),
        ({"request_rate": 2.0, "arrival": "constant"}, "random", "constant"),
        ({}, "mooncake", "trace"),
        ({"max_concurrency": 4}, "azure", "closed loop"),
        ({"max_concurrency": 4, "arrival": "trace"}, "azure", "trace"),
        ({"request_rate": 2.0}, "azure", "poisson"),
        (RAMP, "mooncake", "ramp"),
    ],
)
def test_the_process_follows_from_what_is_asked(changes: dict[str, Any], dataset_name: str, process: str) -> None:
    assert process_of(ServeBenchSettings(**changes), DatasetSettings(dataset_name=dataset_name)) == process


@pytest.mark.parametrize(
    "changes",
    [{"arrival": "trace", "request_rate": 2.0}, {"arrival": "constant"}, {"arrival": "constant", "max_concurrency": 2}],
)
def test_settings_that_contradict_each_other_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="--arrival"):
        process_of(ServeBenchSettings(**changes), DatasetSettings())


def test_every_process_gives_each_prompt_its_time() -> None:
    def offsets(name: str, **changes: Any) -> tuple[float, ...] | None:
        dataset = DatasetSettings(dataset_name=name, time_scale=0.5)
        return arrivals_of(ServeBenchSettings(**changes), dataset, PROMPTS)[0]

    assert offsets("random") == (0.0, 0.0, 0.0)
    assert offsets("random", max_concurrency=2) is None
    assert offsets("random", request_rate=2.0, arrival="constant") == (0.5, 1.0, 1.5)
    assert offsets("mooncake") == (0.0, 0.5, 1.5)
    poisson = offsets("random", request_rate=2.0)
    assert poisson is not None
    assert poisson[-1] == pytest.approx(1.5)
    ramp = offsets("random", **RAMP)
    assert ramp is not None
    assert len(ramp) == 3
