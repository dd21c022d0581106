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
