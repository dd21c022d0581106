"""The inputs that tokens of a short convolution see, however their sequences are cut into steps."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from baton.device.host import HostDevice
from baton.engine.attention.base import SequenceShare, attention_staging_bytes
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.wire.layout import STATE, KvLayout, LayerKv

BLOCK_SIZE, SIZE, NUM_BLOCKS = 4, 8, 24


def backend(num_rows: int) -> TorchAttention:
    """Over a layer with attention between two with states, in blocks full of what somebody left there."""
    state = LayerKv(num_rows, SIZE, kind=STATE)
    layout = KvLayout.of_layers("float32", BLOCK_SIZE, [state, LayerKv(1, 2), state])
    blocks = torch.full((NUM_BLOCKS, layout.block_bytes // 4), float("nan"))
    return TorchAttention(PagedKv(layout, blocks))


def seen(inputs: Tensor, num_rows: int) -> Tensor:
    """[tokens, num_rows + 1, SIZE]: each token's own input behind those before it."""
    padded = torch.cat((torch.zeros(num_rows, SIZE), inputs))
    return torch.stack([padded[first : first + num_rows + 1] for first in range(len(inputs))])


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_see_the_inputs_before_them_in_any_steps(num_rows: int, seed: int) -> None:
    source = random.Random(f"{num_rows}:{seed}")
    attention = backend(num_rows)
    ids = source.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = [1, 13, 16, 22]
    tables = [tuple(ids.pop() for _ in range(-(-length // BLOCK_SIZE))) for length in lengths]
    inputs = [torch.randn(2, length, SIZE, generator=torch.Generator().manual_seed(seed)) for length in lengths]
    done = [0] * len(lengths)
    staging = HostDevice().staging(attention_staging_bytes(64, 4, 8))
    while any(done[number] < length for number, length in enumerate(lengths)):
        counts = [min(source.choice((0, 1, 1, 3, 9)), length - at) for at, length in zip(done, lengths, strict=True)]
        chosen = [number for number, count in enumerate(counts) if count]
        if not chosen:
            continue
        shares = [SequenceShare(done[number], counts[number], tables[number]) for number in chosen]
        staging.begin()
        attention.plan(shares, staging)
        staging.upload()
        for layer, place in ((0, 0), (2, 1)):
            now = [inputs[number][place][done[number] : done[number] + counts[number]] for number in chosen]
            found = attention.recent(layer, torch.cat(now), num_rows)
            expected = [
                seen(inputs[number][place], num_rows)[done[number] : done[number] + counts[number]] for number in chosen
            ]
            assert found.equal(torch.cat(expected))
        for number in chosen:
            done[number] += counts[number]


def test_a_full_block_holds_the_state_at_its_end_for_whoever_finds_it() -> None:
    attention = backend(2)
    first, second = torch.randn(2, 11, SIZE)
    second[:8] = first[:8]
    staging = HostDevice().staging(attention_staging_bytes(64, 4, 8))

    def compute(share: SequenceShare, inputs: Tensor) -> Tensor:
        staging.begin()
        attention.plan([share], staging)
        staging.upload()
        return attention.recent(0, inputs[share.start : share.context_len], 2)

    compute(SequenceShare(0, 11, (5, 3, 9)), first)
    assert compute(SequenceShare(8, 3, (5, 3, 7)), second).equal(seen(second, 2)[8:])
    assert compute(SequenceShare(4, 7, (5, 2, 4)), first).equal(seen(first, 2)[4:])


@pytest.mark.parametrize("share_right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_state_is_the_one_behind_the_last_draft_that_was_right(seed: int, share_right: float) -> None:
    """That of inputs, and what is carried: here the sum of all inputs."""
    chance, num_rows, num_carried, most = random.Random(f"{seed}:{share_right}"), 3, SIZE, 6
    state = LayerKv(num_rows + 1, SIZE, kind=STATE, num_carried=num_carried)
    layout = KvLayout.of_layers("float32", BLOCK_SIZE, [state, LayerKv(1, 2)])
    blocks = torch.full((40, layout.block_bytes // 4), float("nan"))
    attention = TorchAttention(PagedKv(layout, blocks, draft_blocks=range(28, 40)))
    ids = chance.sample(range(28), 28)
    tables, lengths = (tuple(ids[:14]), tuple(ids[14:])), (43, 41)
    inputs = torch.randn(2, 64, SIZE, generator=torch.Generator().manual_seed(seed))
    staging = HostDevice().staging(attention_staging_bytes(64, 2, 14) + 2**12)
    done = [0, 0]
    while chosen := [number for number in (0, 1) if done[number] < lengths[number]]:
        shares, now, num_right = list[SequenceShare](), list[Tensor](), list[int]()
        for number in chosen:
            at = done[number]
            num_known = chance.choice((1, 1, 2, 5))
            num_drafts = chance.randrange(most + 1)
            found = inputs[number][at : at + num_known + num_drafts].clone()
            right = next((n for n in range(num_drafts) if chance.random() >= share_right), num_drafts)
            found[num_known + right :] += 1.0
            shares.append(SequenceShare(at, num_known + num_drafts, tables[number], num_drafts))
            now.append(found)
            num_right += [right] if num_drafts else []
            done[number] += num_known + right
        staging.begin()
        attention.plan(shares, staging)
        staging.upload()
        windows, x = attention.recent(0, torch.cat(now), num_rows), torch.cat(now)
        carried = attention.carried(0, num_rows, num_carried)
        for piece in sorted(attention.pieces, key=lambda piece: piece.level):
            before = 0.0 if piece.before is None else carried[piece.before].clone()
            carried[piece.block] = before + x[piece.first : piece.last].sum(dim=0)
        attention.settle(torch.tensor(num_right, dtype=torch.int64))
        first = 0
        for number, share in zip(chosen, shares, strict=True):
            count = done[number] - share.start
            expected = seen(inputs[number], num_rows)[share.start : done[number]]
            assert windows[first : first + count].equal(expected)
            first += share.num_tokens
            ends = {*range(BLOCK_SIZE, done[number], BLOCK_SIZE), done[number]}
            for end in ends:
                block = tables[number][(end - 1) // BLOCK_SIZE]
                assert (
                    attention.carried(0, 0, num_rows * SIZE)[block]
                    .view(num_rows, SIZE)
                    .equal(seen(inputs[number], num_rows)[end - 1][1:])
                )
                assert carried[block].allclose(inputs[number][:end].sum(dim=0), atol=1e-4)
