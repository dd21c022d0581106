"""Ranks that add up over gloo, each in a thread of the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.executor.world import World
from engine.models.shard import Shard

NUM_RANKS, WIDTH = 3, 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_how_many_are_added_up(tmp_path: Path, dtype: torch.dtype) -> None:
    given = torch.randn(NUM_RANKS, 301, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)
    in_order = (given[0] + given[1]) + given[2]
    assert not torch.equal(in_order, given[0] + (given[1] + given[2])), "the order makes no difference here"

    def add_up(rank: int) -> list[torch.Tensor]:
        world = World(Shard(rank, NUM_RANKS), str(tmp_path / "ranks"), b"nonce", 30.0)
        return [world.add_up(given[rank, :num_rows].clone()) for num_rows in (1, 301)]

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        for alone, together in threads.map(add_up, range(NUM_RANKS)):
            assert torch.equal(alone, in_order[:1])
            assert torch.equal(together, in_order)
