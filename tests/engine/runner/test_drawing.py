"""How tokens are drawn: both ways follow the weights (`test_sampler.py`), and by a race two models often agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.runner.drawing import INVERSE, RACE, Drawing, exponentials
from baton.engine.runner.sampled_rows import uniform_noise

VOCAB_SIZE = 400


def noise_of(num_rows: int) -> torch.Tensor:
    return torch.tensor([[uniform_noise(seed, 0, 5)] for seed in range(num_rows)], dtype=torch.float64)


def agreement(drawing: Drawing, first: torch.Tensor, second: torch.Tensor) -> float:
    """How often the same token is drawn from two distributions by the same noise."""
    noise = noise_of(4000)
    drawn = [drawing.of_all(each.expand(len(noise), -1).clone(), noise) for each in (first, second)]
    return float((drawn[0] == drawn[1]).double().mean())


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_models_that_differ_little_draw_the_same_token_nearly_as_often_as_can_be(spread: float) -> None:
    """No rule agrees more often than the distributions overlap."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64) * 2
    other = logits + torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64) * spread
    first, second = logits.softmax(0), other.softmax(0)
    overlap = float(torch.minimum(first, second).sum())
    raced, inverse = agreement(RACE, first, second), agreement(INVERSE, first, second)
    assert overlap / (2 - overlap) - 0.03 < raced < overlap + 0.03
    assert inverse < 0.7 * raced


def test_times_are_exponential_and_depend_on_noise_and_id_alone() -> None:
    noise, ids = noise_of(60), torch.arange(VOCAB_SIZE)
    times = exponentials(noise, ids)
    assert torch.equal(exponentials(noise[7:9], ids), times[7:9])
    some = torch.tensor([[5, 399], [0, 17]])
    assert torch.equal(exponentials(noise[:2], some), times[:2].gather(1, some))
    shares = np.histogram((-times).exp().numpy(), bins=20, range=(0, 1))[0] / times.numel()
    assert np.abs(shares - 0.05).max() < 0.005
    neighbours = torch.stack([times[:, :-1].flatten(), times[:, 1:].flatten()])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.03
    rows = torch.stack([times[:-1].flatten(), times[1:].flatten()])
    assert abs(float(torch.corrcoef(rows)[0, 1])) < 0.03


def test_the_first_tokens_race_alone() -> None:
    noise, weights = noise_of(200), torch.rand(200, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ids = torch.arange(10).flip(0).expand(200, -1)
    last = torch.full((200, 1), 3)
    found = RACE.of_first(weights, weights.cumsum(-1), last, ids, noise)
    assert set(found.flatten().tolist()) == {0, 1, 2, 3}
    alone = RACE.of_first(weights[:, :4], weights[:, :4].cumsum(-1), last, ids[:, :4], noise)
    assert torch.equal(found, alone)
