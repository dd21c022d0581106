"""The most likely tokens by the CPU kernels, at every dispatch level: torch's, whatever is ruled out."""

from __future__ import annotations

from ctypes import addressof

import pytest
import torch
from torch import Tensor

from baton.engine.native.arguments import (
    DUE,
    KINDS,
    NOT_PACKED,
    POSITIONS,
    TOKEN_IDS,
    BatonCall,
    BatonGather,
    BatonStep,
)
from tests.engine.native.argmax_calls import Rows
from tests.engine.native.compiled import kernels, needs_kernels
from tests.engine.native.linear_calls import guarded, guarded_copy

pytestmark = needs_kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 16, 63, 64, 65, 300, 1792, 16385, 40001)
"""Below and above a vector, several chains of them, and rows that two threads share."""


def random(num_rows: int, size: int, dtype: torch.dtype, seed: int, gap: int = 0) -> Tensor:
    """Few different values, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-40, 40, (num_rows, size), generator=generator).to(dtype)
    return guarded_copy(values, size + gap)


def random_masks(num_masks: int, size: int, seed: int) -> Tensor:
    """The last mask allows one token, the one before it none."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(0, 256, (num_masks, -(-size // 8)), generator=generator, dtype=torch.uint8)
    masks[-2:] = 0
    masks[-1, (size - 1) // 8] = 1 << ((size - 1) % 8)
    return masks


def assert_is_torchs(rows: Rows, level: str, num_threads: int) -> None:
    expected = rows.ruled_out()
    largest, token_ids = expected.max(dim=-1)
    found_ids, found_largest, is_valid = rows.find(level, num_threads)
    assert torch.equal(found_ids, token_ids)
    assert torch.equal(is_valid, largest > -torch.inf)
    assert torch.equal(found_largest.nan_to_num(nan=1e30), largest.nan_to_num(nan=1e30))
    if rows.wide is not None and rows.wide_logits is not None:
        for row in rows.wide.nonzero().flatten().tolist():
            torch.testing.assert_close(rows.wide_logits[row], expected[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_the_largest_is_found(level: str, dtype: torch.dtype) -> None:
    for seed, size in enumerate(SIZES):
        for num_rows in (1, 3, 17):
            rows = Rows(random(num_rows, size, dtype, seed, gap=seed))
            for num_threads in (1, 2):
                assert_is_torchs(rows, level, num_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_masks_rule_out_is_not_found(level: str, dtype: torch.dtype) -> None:
    for seed, size in enumerate(SIZES):
        for num_rows in (5, 17):
            mask_of = torch.arange(num_rows).remainder(5) - 1
            rows = Rows(random(num_rows, size, dtype, seed), random_masks(4, size, seed), mask_of)
            for num_threads in (1, 2):
                assert_is_torchs(rows, level, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_wide_rows_are_read_instead_and_have_masks_written(level: str, num_threads: int) -> None:
    for seed, size in enumerate(SIZES):
        for num_rows in (6, 17):
            wide = torch.arange(num_rows).remainder(2).to(torch.uint8)
            mask_of = torch.arange(num_rows).remainder(3) - 1
            wide_logits = random(num_rows, size, torch.float32, seed + 100)
            unread = wide_logits[wide == 0].clone()
            logits = random(num_rows, size, torch.bfloat16, seed)
            assert_is_torchs(Rows(logits, random_masks(3, size, seed), mask_of, wide, wide_logits), level, num_threads)
            assert torch.equal(wide_logits[wide == 0], unread)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_hold_no_numbers_are_told_as_torch_tells_them(level: str, dtype: torch.dtype) -> None:
    for size in (1, 65, 300, 40001):
        logits = random(8, size, dtype, size)
        for row, place in enumerate((0, size // 2, size - 1)):
            logits[row, place:] = torch.nan
        logits[3] = -torch.inf
        logits[4, size - 1] = torch.inf
        logits[5, -1], logits[5, 0] = torch.nan, torch.inf
        logits[6] = 0.0
        logits[6, 0] = -0.0
        masks = torch.full((1, -(-size // 8)), 0x55, dtype=torch.uint8)
        for num_threads in (1, 2):
            assert_is_torchs(Rows(logits), level, num_threads)
            assert_is_torchs(Rows(logits, masks, torch.zeros(8, dtype=torch.int64)), level, num_threads)


def test_gathered_rows_are_those_that_the_step_names(level: str) -> None:
    threads = kernels(level, 2)
    for row_bytes, num_rows in ((2, 4), (128, 2), (1030, 60)):
        table = guarded_copy(torch.randint(0, 256, (50, row_bytes), dtype=torch.uint8))
        indexes = [guarded_copy(torch.randint(0, 50, (num_rows,))) for _ in range(3)]
        indexes[0][0], indexes[1][-1] = -1, 50
        step = BatonStep(token_ids=indexes[0].data_ptr(), positions=indexes[1].data_ptr(), due=indexes[2].data_ptr())
        for number, index in enumerate((TOKEN_IDS, POSITIONS, DUE)):
            out = guarded((num_rows, row_bytes), torch.uint8)
            gather = BatonGather(out.data_ptr(), table.data_ptr(), None, 0, row_bytes, len(table), index, NOT_PACKED)
            calls = (BatonCall * 1)(BatonCall(addressof(gather), KINDS[BatonGather]))
            threads.replay(calls, range(1), step, num_rows)
            is_inside = (indexes[number] >= 0) & (indexes[number] < 50)
            expected = torch.where(is_inside[:, None], table[indexes[number].clamp(0, 49)], 255)
            assert torch.equal(out, expected)
