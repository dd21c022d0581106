"""Which prompts get their draft KV beside their own: those for other nodes, where nobody waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool, pack_blocks
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.speculation.draft_model.prompts import PromptDrafts
from baton.wire.images import PromptImage
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import A, B


class Passes:
    """Notes what is computed."""

    def __init__(self) -> None:
        self.launched: list[dict[RequestKey, tuple[int, int]]] = []

    def launch(self, shares: list[ScheduledRequest], layer_stored: LayerStored | None) -> RunningStep:
        assert not any(share.needs_sample for share in shares)
        self.launched.append({share.key: (share.start, share.num_tokens) for share in shares})
        return cast(RunningStep, object())


class Live(dict[RequestKey, Request]):
    num_waiting = 0


class Side:
    """Two prompts of 24 tokens for other nodes."""

    def __init__(self) -> None:
        self.pool, self.passes, self.live = BlockPool(20), Passes(), Live()
        self.coverage = DraftCoverage(self.pool, 4)
        for key in (A, B):
            params = DecodingParams(max_tokens=40)
            request = Request(key, Prompt.of(range(1, 25)), params, b"", 10**6, first_token_only=True)
            request.block_table = pack_blocks(self.pool.allocate(6))
            self.live[key] = request
        self.prompts = PromptDrafts(cast(Any, self.passes), self.coverage, cast(Any, self.live), 40)

    def step(self, *keys: RequestKey, start: int = 0, count: int = 8) -> dict[RequestKey, tuple[int, int]] | None:
        """What is computed beside a step with a chunk of each of these."""
        shares = []
        for key in keys:
            self.live[key].num_computed_tokens = start
            shares.append(self.live[key].share(count))
        launched = self.prompts.launch(Step(tuple(shares)), None)
        return None if launched is None else self.passes.launched[-1]


@pytest.fixture
def side() -> Side:
    return Side()


def test_chunks_are_computed_one_after_another(side: Side) -> None:
    assert side.step(A, B) == {A: (0, 8), B: (0, 8)}
    assert side.step(A, start=8, count=16) == {A: (8, 16)}
    assert [side.coverage.of(side.live[key].block_table, 24) for key in (A, B)] == [24, 8]


def test_nothing_is_computed_where_somebody_waits(side: Side) -> None:
    side.live.num_waiting = 1
    assert side.step(A) is None
    side.live.num_waiting = 0
    side.live[B].first_token_only = False
    assert side.step(A, B) is None
    assert side.step(A) == {A: (0, 8)}


def test_a_prompt_whose_begin_was_left_out_is_left_out(side: Side) -> None:
    """Its earlier blocks are on their way."""
    side.live.num_waiting = 1
    side.step(A)
    side.live.num_waiting = 0
    assert side.step(A, B, start=8) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"most_tokens": 31},
        {"prompt": replace(Prompt.of(range(1, 25)), media=(PromptImage(2, 3, b"d" * 16, b"", 1, 1),))},
    ],
    ids=["short output", "image"],
)
def test_who_will_have_no_drafts_is_left_out(side: Side, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(side.live[A], name, value)
    assert side.step(A, B) == {B: (0, 8)}


def test_a_prompt_beyond_what_the_draft_can_see_is_left_out(side: Side) -> None:
    side.prompts = PromptDrafts(cast(Any, side.passes), side.coverage, cast(Any, side.live), 15)
    assert side.step(A) == {A: (0, 8)}
    assert side.step(A, start=8) is None
