from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.bench.client.outcome import Failure
from baton.bench.serve.result import as_json, result_path
from baton.bench.serve.settings import ServeBenchSettings
from tests.bench.serve.outcomes import answered, failed
from tests.bench.serve.results import result_of

RESULT = {"label": "openai", "model_id": "owner/tiny/", "date": "20260102-030405"}
OUTCOMES = (answered([0.1, 0.25], sent_s=7.0, scheduled_s=6.5), failed(Failure.HTTP_ERROR, "503: busy", sent_s=8.0))


def test_lists_have_one_entry_per_request_failed_ones_too() -> None:
    found = as_json(result_of(OUTCOMES), detailed=True)
    assert found["ttfts"] == [0.1, 0.0]
    assert found["itls"] == [[0.15], []]
    assert found["latencies"] == [0.25, 0.0]
    assert found["start_times"] == [7.0, 8.0]
    assert found["queue_times"] == [0.5, 0.0]
    assert found["output_lens"] == [2, 0]
    assert found["generated_texts"] == ["xx", ""]
    assert found["errors"] == ["", "http error: 503: busy"]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"request_rate": 4.0}, "openai-4.0qps-tiny-20260102-030405.json"),
        ({"max_concurrency": 8}, "openai-infqps-concurrency8-tiny-20260102-030405.json"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 5.0},
            "openai-ramp-up-linear-1.0qps-5.0qps-tiny-20260102-030405.json",
        ),
        ({"result_filename": "mine.json", "result_dir": "out"}, "out/mine.json"),
    ],
)
def test_a_file_is_named_as_by_vllm(changes: dict[str, Any], name: str) -> None:
    assert result_path(ServeBenchSettings(**{"save_result": True, **changes}), RESULT) == Path(name)
