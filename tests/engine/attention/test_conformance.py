"""Promises of every attention backend. flashinfer runs on its stand-in, so its arguments are what these tests check.
The CPU kernels run at every level of this processor."""

from __future__ import annotations

import pytest
import torch

from baton.engine.attention.base import SequenceShare
from baton.wire.layout import LayerKv
from tests.engine.attention.relay import NUM_LAYERS, Relay, dense, run_ragged_mix
from tests.engine.native.compiled import LEVELS

BACKENDS = ("torch", "flashinfer", *LEVELS)


def relay_of(backend: str, group: int = 2, windows: tuple[int | None, ...] = (None, None)) -> Relay:
    """A small relay of a shape that every backend computes."""
    return Relay(backend, group, head_dim=64, block_size=4, dtype=torch.bfloat16, windows=windows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_mixes_match_dense_attention(backend: str, group: int, head_dim: int, dtype: torch.dtype) -> None:
    run_ragged_mix(Relay(backend, group, head_dim, block_size=16, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_block_size_will_do(backend: str, block_size: int) -> None:
    run_ragged_mix(Relay(backend, 2, 64, block_size, torch.bfloat16, num_blocks=60))


@pytest.mark.parametrize("windows", [(1, None), (3, 4), (None, 7), (16, 100)])
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_layer_has_its_own_sliding_window(backend: str, group: int, windows: tuple[int | None, ...]) -> None:
    run_ragged_mix(relay_of(backend, group, windows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_may_store_kv_of_different_shapes(backend: str) -> None:
    layers = (LayerKv(2, 64), LayerKv(1, 128, window=5), LayerKv(4, 64), LayerKv(1, 128, window=5))
    relay = Relay(backend, 2, dtype=torch.bfloat16, layers=layers)
    relay.paged.blocks.fill_(torch.nan)
    run_ragged_mix(relay)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_size_of_chunks_does_not_matter(backend: str, chunk: int) -> None:
    relay = relay_of(backend)
    relay.add(16)
    for start in range(0, 16, chunk):
        relay.step(min(chunk, 16 - start))


@pytest.mark.parametrize("counts", [(1, 1, 6), (6, 1, 1), (1, 6, 1), (1, 1, 1), (6, 6, 6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_single_tokens_may_stand_anywhere_in_a_step(backend: str, counts: tuple[int, int, int]) -> None:
    relay = relay_of(backend)
    for num_tokens in (14, 10, 13):
        relay.add(num_tokens)
    relay.step(5, 3, 7)
    relay.step(*counts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_sequences_attend_to_the_blocks_they_share(backend: str) -> None:
    relay = relay_of(backend)
    first = relay.add(12)
    relay.step(12)
    second = relay.add(12)
    for layer, window in enumerate(relay.windows):
        for part in range(3):
            second.qkv[layer][part][:8] = first.qkv[layer][part][:8]
        second.expected[layer] = dense(*second.qkv[layer], window)
    second.block_table[:2] = first.block_table[:2]
    second.num_done = 8
    relay.step(0, 4)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_block_held_before_does_not_matter(backend: str, group: int) -> None:
    relay = relay_of(backend, group)
    relay.kv.fill_(torch.nan)
    run_ragged_mix(relay)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_writes_to_the_blocks_of_its_requests_alone(backend: str) -> None:
    relay = relay_of(backend)
    before = relay.kv.clone()
    runner = relay.add(6)
    relay.step(6)
    untouched = [block for block in range(relay.num_blocks) if block not in runner.block_table]
    assert torch.equal(relay.kv[untouched], before[untouched])
    for layer in range(NUM_LAYERS):
        for part in (0, 1):
            stored = relay.kv[runner.block_table, layer, part].transpose(1, 2).reshape(8, 2, 64)[:6]
            assert torch.equal(stored, runner.qkv[layer][1 + part])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_table_may_be_longer_than_the_context(backend: str) -> None:
    relay = relay_of(backend)
    runner = relay.add(5)
    runner.block_table += [relay.free.pop(), relay.free.pop()]
    relay.step(4)
    relay.step(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_keys_may_be_views_of_one_projection(backend: str) -> None:
    relay = relay_of(backend)
    runner = relay.add(6)
    relay.staging.begin()
    relay.attention.plan([SequenceShare(0, 6, runner.block_table)], relay.staging)
    relay.staging.upload()
    for layer in range(NUM_LAYERS):
        joined = torch.cat(runner.qkv[layer], dim=1)
        found = relay.attention.run(layer, joined[:, :4], joined[:, 4:6], joined[:, 6:])
        relay.compare(layer, [(runner, 6)], found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_counts_as_stored_when_its_keys_and_values_are_there(backend: str) -> None:
    relay = relay_of(backend)
    runner = relay.add(3)
    seen = []
    relay.staging.begin()
    blocks = runner.block_table
    layers = iter(range(NUM_LAYERS))
    relay.attention.plan(
        [SequenceShare(0, 3, blocks)],
        relay.staging,
        lambda: seen.append(relay.kv[blocks[0], next(layers), :, :, :3].clone()),
    )
    relay.staging.upload()
    for layer in range(NUM_LAYERS):
        relay.attention.run(layer, *runner.qkv[layer])
        _, k, v = runner.qkv[layer]
        assert torch.equal(seen[-1], torch.stack([k, v]).transpose(1, 2))
    assert len(seen) == NUM_LAYERS
