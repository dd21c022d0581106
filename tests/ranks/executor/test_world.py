"""Ranks that add up over gloo, each in a thread of the test."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.models.shard import Shard
from baton.ranks.executor import world as worlds
from baton.ranks.executor.world import World
from baton.wire.errors import InvalidSetting
from tests.ranks.executor.board import Board


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


@pytest.mark.parametrize("records", [False, True])
def test_shares_stand_side_by_side_on_the_first_rank_and_what_it_has_is_everybodys(records: bool) -> None:
    board = Board()

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        world = World(Shard(rank, 3), board.meeting(), b"nonce", records=records)
        share = torch.full((2, 1), float(rank))
        values = torch.full((4,), rank + 5)
        world.from_first(values)
        return world.side_by_side(share), world.add_up(torch.tensor([1.0 + rank])), values

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, range(3)))
    assert torch.equal(found[0][0], torch.tensor([[0.0, 1.0, 2.0]] * 2))
    for rank, (share, total, values) in enumerate(found):
        assert rank == 0 or torch.equal(share, torch.full((2, 1), float(rank)))
        assert torch.equal(total, torch.tensor([6.0]))
        assert torch.equal(values, torch.full((4,), 5))


def test_ranks_on_gpus_need_a_torch_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(InvalidSetting, match=r"this torch has no NCCL; install a CUDA build"):
        World(Shard(0, 2), Board().meeting(), b"nonce", device=torch.device("cuda", 0))


@pytest.mark.parametrize("before", [None, "0"])
def test_torch_starts_no_thread_for_a_group_on_gpus_and_the_process_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    found: list[str | None] = []

    class Group:
        """Sees what the group of torch would: it reads this when it is made."""

        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            found.append(os.environ.get(name))

    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(worlds._DIST, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(World, "_recognise", lambda *arguments: None)
    World(Shard(0, 2), Board().meeting(), b"nonce", device=torch.device("cuda", 0))
    assert (found, os.environ.get(name)) == (["1"], before)
