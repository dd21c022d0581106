from __future__ import annotations

import pytest

from baton.bench.client.outcome import Failure, Outcome
from baton.bench.serve.command import notes_of
from baton.bench.serve.metrics import summarise
from baton.bench.workload.dataset_settings import DatasetSettings
from tests.bench.serve.outcomes import answered, failed
from tests.bench.serve.results import load_of


def notes(*outcomes: Outcome, **client: float) -> list[str]:
    load = load_of(outcomes, **client)
    return list(notes_of(summarise(outcomes, 5.0, {}), load, DatasetSettings(random_prefix_len=2)))


def test_a_run_without_doubts_has_no_notes() -> None:
    outcome = answered([0.1, 0.2], prompt_tokens_details={"cached_tokens": 2})
    assert notes(*[outcome] * 100, num_late=1, cpu_share=0.9) == []


@pytest.mark.parametrize(
    ("outcome", "client", "words"),
    [
        (answered([0.1, 0.2], num_output=8), {}, "0.25 chunks per token"),
        (answered([0.1, 0.2, 0.2, 0.3, 0.4]), {}, "25% of the chunks"),
        (answered([0.1, 0.2]), {"cpu_share": 0.91}, "91% of a core"),
        (answered([0.1, 0.2]), {"num_late": 1}, "1 of 1 requests were sent over 10 ms late"),
        (answered([0.1, 0.2], prompt_tokens_details={"cached_tokens": 3}), {}, "another --seed"),
        (failed(Failure.STALLED), {}, "1 of 1 requests failed"),
    ],
)
def test_each_doubt_is_one_sentence(outcome: Outcome, client: dict[str, float], words: str) -> None:
    found = notes(outcome, **client)
    assert len(found) == 1
    assert words in found[0]
