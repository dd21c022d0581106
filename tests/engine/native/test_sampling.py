"""Tokens drawn by the CPU kernels, at every dispatch level: those where the sum of float64 weights passes the noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.runner.grammar_masks import Masks
from baton.engine.runner.native_sampling import argmax, draw
from baton.engine.runner.sampling_plan import SampleGroup
from tests.engine.native.argmax_calls import bits_of
from tests.engine.native.compiled import kernels, needs_kernels
from tests.engine.native.linear_calls import guarded_copy
from tests.engine.native.test_argmax import random_masks

pytestmark = needs_kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 63, 64, 65, 300, 1792, 16385, 40001)
"""Below and above a block, and rows with more blocks than segments."""
LARGEST = torch.finfo(torch.float32).max


def drawn(
    logits: Tensor, rows: Sequence[int], parameters: Tensor, level: str, num_threads: int, masks: Masks | None = None
) -> list[int]:
    """The token ids of all rows; parameters: [3, R], temperature, noise and min-p of `rows`."""
    temperature, noise, min_p = parameters.to(torch.float64)
    group = SampleGroup(
        width=0,
        rows=guarded_copy(torch.tensor(rows)),
        top_k=torch.empty(0),
        first_row=-1,
        parameters=torch.stack([temperature, noise, torch.full_like(noise, torch.inf), min_p]),
        has_top_p=False,
        has_min_p=True,
    )
    threads = kernels(level, num_threads)
    found = argmax(threads, logits, masks, logits, ())
    draw(threads, found, group)
    return found.token_ids.tolist()


def require_drawn(row: Tensor, token_id: int, parameters: Sequence[float]) -> None:
    """That the noise falls into the share of this token, up to rounding. row: [V], -inf where nothing is allowed."""
    temperature, noise, min_p = parameters
    values = row.double().clamp(max=LARGEST).numpy()
    weights = np.exp((values - values.max()) / temperature)
    weights[weights < min_p] = 0.0
    ends = weights.cumsum()
    wanted, rounding = noise * ends[-1], 1e-12 * ends[-1]
    assert weights[token_id] > 0
    assert ends[token_id] - weights[token_id] - rounding <= wanted <= ends[token_id] + rounding


def masks_of(bits: Tensor, rows: Sequence[int]) -> Masks:
    """bits: [len(rows), W]."""
    return Masks(len(rows), torch.tensor(rows), guarded_copy(bits.flatten()))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_drawn_where_the_noise_falls(level: str, dtype: torch.dtype, num_threads: int) -> None:
    for seed, size in enumerate(SIZES):
        generator = torch.Generator().manual_seed(seed)
        logits = guarded_copy((torch.randn(6, size, generator=generator) * 3).to(dtype), size + seed)
        parameters = torch.rand(3, 4, generator=generator) * torch.tensor([[1.5], [1.0], [0.3]]) + 1e-3
        parameters[1, 0], parameters[1, 1] = 0.0, 1 - 1e-7
        masked, rows = [1, 2, 5], [0, 1, 2, 5]
        bits = random_masks(5, size, seed)[[0, 1, 4]]
        token_ids = drawn(logits, rows, parameters, level, num_threads, masks_of(bits, masked))
        values = logits.float()
        for row, mask in zip(masked, bits, strict=True):
            values[row].masked_fill_(bits_of(mask, size).logical_not(), -torch.inf)
        for number, row in enumerate(rows):
            if bool(values[row].isfinite().any()):
                require_drawn(values[row], token_ids[row], parameters[:, number].tolist())
        # nothing was drawn for these
        assert [token_ids[row] for row in (3, 4)] == values[3:5].argmax(dim=-1).tolist()


def test_extreme_rows_have_a_token_and_rows_without_one_keep_theirs(level: str) -> None:
    logits = torch.zeros(6, 300)
    logits[0, 7] = torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3, 100:] = LARGEST
    logits[4] = -LARGEST
    logits[5, 20], logits[5, 10] = 1e-3, 1.0
    noise = 1 - 2**-53
    parameters = torch.tensor([[1.0] * 5 + [1e-310], [noise] * 6, [0.0] * 6], dtype=torch.float64)
    found = drawn(logits, range(6), parameters, level, 1)
    assert found[0] == 7
    assert found[1:3] == [0, 5]
    assert found[3:] == [299, 299, 10]


def test_what_a_mask_rules_out_is_not_drawn_however_likely_it_is(level: str) -> None:
    logits = torch.zeros(3, 200)
    logits[:, ::2] = 3e38
    bits = torch.zeros(3, 25, dtype=torch.uint8)
    bits[0, 24], bits[1, 8], bits[2] = 0x80, 0x08, 0xAA
    noise = torch.tensor([0.9999, 0.0, 0.995])
    parameters = torch.stack([torch.full((3,), 1e-6), noise, torch.zeros(3)])
    assert drawn(logits, range(3), parameters, level, 1, masks_of(bits, range(3))) == [199, 67, 199]


def test_a_row_draws_the_same_token_in_every_batch(level: str) -> None:
    logits = (torch.randn(20, 5000, generator=torch.Generator().manual_seed(1)) * 2).to(torch.bfloat16)
    parameters = torch.rand(3, 20, generator=torch.Generator().manual_seed(2)) * torch.tensor([[2.0], [1.0], [0.01]])
    together = drawn(logits, range(20), parameters, level, 2)
    for row in range(20):
        alone = drawn(logits[row : row + 1].clone(), [0], parameters[:, row : row + 1], level, 1)
        assert alone == [together[row]]
