"""A sampler with CPU kernels samples what torch samples, from logits in any dtype, whatever rows a batch has."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.device.host import HostStaging
from baton.engine.native.library import Kernels
from baton.engine.runner.sampler import Sampler
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import SampledToken
from baton.wire.sampling import DecodingParams
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels
from tests.engine.runner.test_grammar_masks import Fixed
from tests.engine.runner.test_sampler_batches import EOS, VOCAB_SIZE, choose_logits, choose_request

pytestmark = needs_kernels
MASK_BYTES = -(-VOCAB_SIZE // 8)
GREEDY = DecodingParams(temperature=0.0)


def sample_rows(
    logits: Tensor, requests: Sequence[ScheduledRequest], threads: Kernels | None
) -> list[SampledToken | None]:
    sampler = Sampler(frozenset({EOS}), VOCAB_SIZE, threads)
    plan = sampler.plan(requests, HostStaging())
    plain = sampler.sample_plain(plan, logits)
    assert (plain is not None) == (threads is not None and not plan.wide_rows)
    if plain is not None:
        return plain.tokens()
    return plan.tokens([each.numpy() for each in sampler.sample(plan, logits.clone())])


def choose_batch(choose: random.Random) -> tuple[Tensor, list[ScheduledRequest]]:
    """Greedy rows without and with grammars among others, some alone and some beside rows of every kind."""
    num_rows, kinds = (
        choose.randint(1, 20),
        choose.choice([("plain",), ("plain", "grammar"), ("plain", "grammar", "any")]),
    )
    requests = []
    for _ in range(num_rows):
        request, kind = choose_request(choose), choose.choice(kinds)
        if kind != "any":
            request = request._replace(params=GREEDY)
        if kind != "plain":
            request = request._replace(matcher=Fixed(choose.randbytes(MASK_BYTES)))  # type: ignore[arg-type]
        requests.append(request)
    return choose_logits(choose, num_rows), requests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_batch_gets_the_tokens_that_torch_gives_it(dtype: torch.dtype, num_threads: int) -> None:
    choose, threads, num_valid = random.Random(num_threads), kernels(LEVELS[0], num_threads), 0
    for _ in range(60):
        logits, requests = choose_batch(choose)
        logits = logits.to(dtype)
        expected = sample_rows(logits.float(), requests, None)
        assert sample_rows(logits, requests, threads) == expected
        num_valid += sum(token is not None for token in expected)
    assert num_valid > 300


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_row_without_a_number_gets_no_token_beside_those_that_take_their_largest(num_rows: int) -> None:
    choose = random.Random(num_rows)
    logits = choose_logits(choose, num_rows + 1).nan_to_num(0.0, 9.0, -9.0)
    logits[num_rows, 3] = torch.nan
    requests = [choose_request(choose)._replace(params=GREEDY, takes_largest=True) for _ in range(num_rows + 1)]

    *tokens, last = sample_rows(logits, requests, kernels(LEVELS[0], 1))

    assert [token.token_id for token in tokens if token is not None] == logits[:num_rows].argmax(dim=1).tolist()
    assert last is None
