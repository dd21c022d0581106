from __future__ import annotations

from typing import Any

import pytest

from baton.bench.client.outcome import Outcome
from baton.bench.limits.served import HandoffSamples, handoff_ratios
from baton.runtime.clock import host_clock
from baton.wire.errors import RequestFailed

NUM_BYTES = 2_000_000


def outcome(**changes: Any) -> Outcome:
    """Token 1 was drawn at 5 s, its KV was there 400 us later, the client had the token after 900 us."""
    timings = {"clock": host_clock(), "first_sampled_us": 5_000_000, "kv_ready_us": 5_000_400, **changes}
    usage = {"kv_transfer": {"bytes": NUM_BYTES}, "timings": timings}
    return Outcome(0, 0, "http://x", 4.0, chunk_s=[5.0009, 5.01], usage=usage)


def samples() -> HandoffSamples:
    return HandoffSamples(num_prompt_tokens=512, num_bytes=NUM_BYTES, num_layers=8)


def test_what_is_exposed_is_held_against_a_copy_of_as_many_bytes() -> None:
    found = samples()
    for copy_s_per_byte in (1e-10, 1.1e-10):
        found.add(outcome(), copy_s_per_byte)
    exposed, handover = handoff_ratios(found)
    assert (exposed.name, handover.name) == ("exposed_ratio", "handover_us")
    assert exposed.value == pytest.approx(400 / 210)
    assert exposed.goal.startswith("0.125")
    assert handover.value == pytest.approx(900, abs=0.01)
    assert not exposed.noisy


def test_kv_that_was_there_before_the_token_exposes_nothing() -> None:
    found = samples()
    found.add(outcome(kv_ready_us=4_999_000), 1e-10)
    assert found.exposed_us == [0.0]


@pytest.mark.parametrize("changes", [{"clock": "another"}, {"kv_ready_us": None}, {"first_sampled_us": None}])
def test_stamps_that_cannot_be_used_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestFailed, match="without the stamps"):
        samples().add(outcome(**changes), 1e-10)


def test_an_answer_without_a_handoff_is_an_error() -> None:
    without = outcome()
    del without.usage["kv_transfer"]
    with pytest.raises(RequestFailed, match="without a handoff"):
        samples().add(without, 1e-10)
