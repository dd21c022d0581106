"""The index arrays of a step: each token's slot, and the blocks of all sequences one after another."""

from __future__ import annotations

import ctypes
import random
from array import array
from itertools import chain

import pytest
import torch
from torch import Tensor

from baton.engine.native.arguments import PLAN_TOO_LARGE, PLANNED, BatonPlan, BatonSequence
from tests.engine.native.calls import Share
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels
from tests.engine.native.linear_calls import guarded

pytestmark = needs_kernels
ARRAYS = ("slots", "first_token", "start", "counts", "table_begin", "block_tables")


class Plan:
    """A call with memory for exactly so many tokens, sequences and blocks."""

    def __init__(self, shares: list[Share], block_size: int, room: tuple[int, int, int]) -> None:
        self.tables = [array("i", share.table) for share in shares]
        self.sequences = (BatonSequence * len(shares))(
            *(
                BatonSequence(share.start, share.num_tokens, *table.buffer_info())
                for share, table in zip(shares, self.tables, strict=True)
            )
        )
        sizes = (room[0], *[room[1]] * 4, room[2])
        self.written = {name: guarded((size,), torch.int64) for name, size in zip(ARRAYS, sizes, strict=True)}
        addresses = {name: each.data_ptr() for name, each in self.written.items()}
        self.call = BatonPlan(ctypes.addressof(self.sequences), len(shares), block_size, *room, **addresses)

    def make(self) -> int:
        return kernels(LEVELS[0]).plan(self.call)


def expected(shares: list[Share], block_size: int) -> dict[str, Tensor]:
    counts = [share.num_tokens for share in shares]
    used = [list(share.table[: -(-(share.start + share.num_tokens) // block_size)]) for share in shares]
    slots = [
        share.table[place // block_size] * block_size + place % block_size
        for share in shares
        for place in range(share.start, share.start + share.num_tokens)
    ]
    lists = (
        slots,
        [sum(counts[:number]) for number in range(len(shares))],
        [share.start for share in shares],
        counts,
        [sum(map(len, used[:number])) for number in range(len(shares))],
        list(chain.from_iterable(used)),
    )
    return {name: torch.tensor(values) for name, values in zip(ARRAYS, lists, strict=True)}


def random_shares(choose: random.Random, block_size: int) -> list[Share]:
    """Prompts, parts of them and single tokens, with more blocks than they need."""
    shares = []
    for _ in range(choose.randint(1, 20)):
        start, num_tokens = choose.randrange(70), choose.choice((1, 1, choose.randint(2, 40)))
        num_blocks = -(-(start + num_tokens) // block_size) + choose.randrange(3)
        shares.append(Share(start, num_tokens, [choose.randrange(2**31) for _ in range(num_blocks)]))
    return shares


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_plan_is_what_its_arrays_say(block_size: int) -> None:
    choose = random.Random(block_size)
    for _ in range(40):
        shares = random_shares(choose, block_size)
        arrays = expected(shares, block_size)
        room = (len(arrays["slots"]), len(shares), len(arrays["block_tables"]))
        plan = Plan(shares, block_size, room)
        assert plan.make() == PLANNED
        for name, values in arrays.items():
            assert torch.equal(plan.written[name], values), name
        contexts = [share.start + share.num_tokens for share in shares]
        assert (plan.call.num_tokens, plan.call.num_blocks, plan.call.num_positions) == (
            room[0],
            room[2],
            max(contexts),
        )


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_without_room_nothing_is_written_but_what_is_needed(lacking: int) -> None:
    shares = [Share(5, 3, (7, 8)), Share(0, 1, (9,))]
    room = [4, 2, 3]
    room[lacking] -= 1
    plan = Plan(shares, 4, (room[0], room[1], room[2]))
    assert plan.make() == PLAN_TOO_LARGE
    assert (plan.call.num_tokens, plan.call.num_blocks) == (4, 3)
    assert not any(each.any() for each in plan.written.values())


@pytest.mark.parametrize("share", [Share(8, 1, (1, 2)), Share(0, 0, (1,)), Share(-1, 2, (1,))])
def test_a_sequence_that_cannot_be_is_refused(share: Share) -> None:
    plan = Plan([Share(0, 1, (0,)), share], 4, (9, 9, 9))
    assert plan.make() not in (PLANNED, PLAN_TOO_LARGE)
    assert not any(each.any() for each in plan.written.values())
