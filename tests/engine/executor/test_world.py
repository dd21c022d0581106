"""Ranks that add up over gloo, each in a thread of the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.executor.world import World
from engine.models.shard import Shard
from tests.engine.executor.board import Board


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ranks", "width"), [(2, 500), (3, 500), (3, 501)])
def test_the_bits_of_a_row_do_not_depend_on_how_many_are_added_up(
    num_ranks: int, width: int, dtype: torch.dtype
) -> None:
    given = torch.randn(num_ranks, 301, width, generator=torch.Generator().manual_seed(5)).to(dtype)
    in_order = given[0] + given[1]
    if num_ranks == 3:
        in_order = in_order + given[2]
        assert not torch.equal(in_order, given[0] + (given[1] + given[2])), "the order makes no difference here"

    board = Board()

    def add_up(rank: int) -> list[torch.Tensor]:
        world = World(Shard(rank, num_ranks), board.meeting(), b"nonce")
        return [world.add_up(given[rank, :num_rows].clone()) for num_rows in (1, 301)]

    with ThreadPoolExecutor(num_ranks) as threads:
        for alone, together in threads.map(add_up, range(num_ranks)):
            assert torch.equal(alone, in_order[:1])
            assert torch.equal(together, in_order)
