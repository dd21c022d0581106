"""A token that a grammar refuses is drawn again, and all tokens are distributed as under a mask from the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from baton.device.emulated import EmulatedDevice
from baton.device.host import HostStaging
from baton.engine.native.library import Kernels
from baton.engine.runner.redraws import redraw_beforehand
from baton.engine.runner.sampler import Sampler
from baton.engine.runner.sampling_plan import sampling_bytes
from baton.engine.scheduler.request import ScheduledRequest
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.engine.native.compiled import LEVELS, kernels
from tests.engine.runner.test_grammar_masks import Fixed

NUM_ROWS, VOCAB_SIZE = 6000, 8
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.5, 0.0, 3.0])
ALLOWED = (1, 2, 4, 6)
MASK = bytes([sum(1 << token_id for token_id in ALLOWED)])


class Asked(Fixed):
    """Counts the masks that were needed."""

    num_masks = 0

    def mask(self) -> bytes | None:
        self.num_masks += 1
        return super().mask()


def requests_of(matcher: Fixed, params: DecodingParams) -> list[ScheduledRequest]:
    """One seed each."""
    key = RequestKey.numbered(1)
    each = ScheduledRequest(key, 0, 1, (0,), Prompt((0,)), (), params, True, matcher=matcher)  # type: ignore[arg-type]
    return [each._replace(params=replace(params, seed=seed)) for seed in range(NUM_ROWS)]


def drawn(requests: list[ScheduledRequest], threads: Kernels | None) -> list[int]:
    """On a host."""
    sampler, logits = Sampler(frozenset(), VOCAB_SIZE, threads), LOGITS.repeat(NUM_ROWS, 1)
    plan = sampler.plan(requests, HostStaging())
    plain = sampler.sample_plain(plan, logits)
    outputs = [each.numpy() for each in sampler.sample(plan, logits)] if plain is None else []
    tokens = plan.tokens(outputs) if plain is None else plain.tokens()
    return [token.token_id for token in tokens if token is not None]


def drawn_beforehand(requests: list[ScheduledRequest]) -> list[int]:
    """On a device that nothing may ask for a token."""
    device = EmulatedDevice()
    sampler, staging = Sampler(frozenset(), VOCAB_SIZE), device.staging(sampling_bytes(NUM_ROWS))
    staging.begin()
    plan = sampler.plan(requests, staging)
    redraw = redraw_beforehand(plan.grammar_rows, VOCAB_SIZE, staging)
    staging.upload()
    logits = LOGITS.repeat(NUM_ROWS, 1).to(device.torch_device)
    tokens = plan.tokens(device.fetch(sampler.sample(plan, logits, redraw)).wait())
    return [token.token_id for token in tokens if token is not None]


@pytest.mark.parametrize(("temperature", "min_p"), [(1.3, 0.0), (1.0, 0.2), (0.0, 0.0)])
def test_tokens_are_distributed_as_under_a_mask(temperature: float, min_p: float) -> None:
    matcher = Asked(MASK)
    requests = requests_of(matcher, DecodingParams(temperature=temperature, min_p=min_p))
    found = drawn(requests, None)
    weights = {each: float(LOGITS[each]) / (temperature or 1e-3) for each in ALLOWED}
    shares = torch.softmax(torch.tensor([*weights.values()]), 0)
    kept = torch.where(shares >= min_p * shares.max(), shares, 0.0)
    counts = Counter(found)
    assert sum(counts[token_id] for token_id in ALLOWED) == len(found) == NUM_ROWS
    for token_id, share in zip(ALLOWED, (kept / kept.sum()).tolist(), strict=True):
        assert counts[token_id] == pytest.approx(NUM_ROWS * share, abs=5 * NUM_ROWS**0.5 / 2)
    assert drawn_beforehand(requests) == found
    if LEVELS:
        assert drawn(requests, kernels(LEVELS[0], 1)) == found


def test_a_token_that_is_accepted_needs_no_mask() -> None:
    matcher = Asked(b"\xff")
    assert len(drawn(requests_of(matcher, DecodingParams(temperature=1.0)), None)) == NUM_ROWS
    assert matcher.num_masks == 0
    drawn(requests_of(matcher, DecodingParams(temperature=1.0, top_p=0.9)), None)
    assert matcher.num_masks == NUM_ROWS
