"""Passes of a draft model: what they overwrite is saved first, and what they cost is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.engine.attention.base import LayerStored
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.speculation.draft_model.passes import DraftPasses
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.engine.scheduler.simulation import Device, InjectedFailure, LaunchedStep
from tests.request_keys import A, B


class Recorded(Device):
    """Notes what happens, in its order."""

    def __init__(self, events: list[Any], failure_rate: float = 0.0) -> None:
        super().__init__(4, failure_rate=failure_rate)
        self.events = events

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> LaunchedStep:
        self.events.append([share.key for share in step.shares])
        return super().launch(step, layer_stored)


class Unsaved:
    """A store that has not saved evicted blocks yet."""

    has_unsaved = True

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def overwriting(self, block_ids: Sequence[int]) -> None:
        self.events.append(list(block_ids))


def share(key: Any, start: int, num_tokens: int) -> ScheduledRequest:
    ids = list(range(1, start + num_tokens + 1))
    return ScheduledRequest(key, start, num_tokens, ids, Prompt.of(ids), range(10, 20), DecodingParams(), True)


def test_blocks_are_saved_before_a_pass_writes_into_them() -> None:
    events: list[Any] = []
    device = Recorded(events)
    passes = DraftPasses(device, 64, 4, cast(Any, Unsaved(events)))
    device.write(list(range(1, 8)), range(10, 20), 0, 6)
    sampled = passes.compute([share(A, 6, 1), share(B, 0, 9)])
    assert events == [[11], [10, 11, 12], [A, B]]
    assert set(sampled) == {A, B}


def test_costs_are_learned_from_passes_and_nothing_from_one_that_failed() -> None:
    passes = DraftPasses(Recorded([]), 64, 4)
    assert (passes.prompt_s(10, 0), passes.decode_s(1, 10)) == (0.0, 0.0)
    for _ in range(16):
        passes.compute([share(A, 0, 20)])
    assert passes.prompt_s(20, 0) > passes.prompt_s(10, 0) > 0.0
    failing = DraftPasses(Recorded([], failure_rate=1.0), 64, 4)
    with pytest.raises(InjectedFailure):
        failing.compute([share(A, 0, 20)])
    assert failing.costs.expected_s is None
    assert not failing.costs._launched
