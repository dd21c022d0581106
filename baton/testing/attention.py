"""What every attention backend must do: shares of random sequences, each compared with dense attention.

A backend's own tests derive from `AttentionSuite` and say how it is chosen, as a package registers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from baton.device.base import Device, Staging
from baton.device.emulated import EmulatedStaging
from baton.device.host import HostDevice
from baton.engine.attention.base import SequenceShare, attention_staging_bytes
from baton.engine.attention.choose import AttentionShape, ChooseAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.wire.errors import InvalidSetting
from baton.wire.layout import KvLayout, LayerKv

NUM_LAYERS = 2
MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS = 256, 8, 32


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole sequence in float64."""
    num_tokens, num_heads, head_dim = q.shape
    keys, values = (x.double().repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / math.sqrt(head_dim)
    places = torch.arange(num_tokens, device=q.device)
    distance = places[:, None] - places
    is_unseen = (distance < 0) | (distance >= (num_tokens if window is None else window))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_unseen, -torch.inf).softmax(-1), values)


@dataclass
class Runner:
    """A sequence with random q, k, v per layer, and the dense result that every share of it is compared with."""

    qkv: list[tuple[Tensor, Tensor, Tensor]]
    expected: list[Tensor]
    block_table: list[int]
    num_done: int = 0

    def share(self, count: int) -> SequenceShare:
        """The next `count` tokens."""
        return SequenceShare(self.num_done, count, self.block_table)


@dataclass
class Relay:
    """Runs shares of sequences through a backend and compares each with the dense result.

    What is staged reaches the backend by the upload only, and is overwritten before the next step. `layers` differ in
    what they are given; without them there is one for each of `windows`, all of one shape. `choose` may raise
    `InvalidSetting` for such a shape.
    """

    choose: ChooseAttention
    device: Device = HostDevice()  # noqa: RUF009
    group: int = 1
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = (None, None)
    num_kv_heads: int = 2
    num_blocks: int = 40
    layers: tuple[LayerKv, ...] = ()
    runners: list[Runner] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.layers = self.layers or tuple(LayerKv(self.num_kv_heads, self.head_dim, w) for w in self.windows)
        layout = KvLayout.of_layers(str(self.dtype).removeprefix("torch."), self.block_size, self.layers)
        block_elements = layout.block_bytes // self.dtype.itemsize
        self.paged = PagedKv(layout, self.normal(self.num_blocks, block_elements) * 9)
        shape = AttentionShape(self.num_kv_heads * self.group, self.dtype, layout, MAX_BLOCKS, 0)
        self.attention = self.choose(self.device, shape).build(self.paged)
        self.staging = self._staging(attention_staging_bytes(MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS))
        self.free = torch.randperm(self.num_blocks, generator=self.random).tolist()

    def _staging(self, num_bytes: int) -> Staging:
        return self.device.staging(num_bytes) if self.device.has_own_memory else EmulatedStaging(num_bytes)

    @property
    def kv(self) -> Tensor:
        """[B, L, 2, Hkv, block_size, D] of layers that have one shape."""
        return self.paged.blocks.view(-1, len(self.layers), 2, self.num_kv_heads, self.block_size, self.head_dim)

    def normal(self, *shape: int) -> Tensor:
        """Random values where the model is."""
        return torch.randn(shape, generator=self.random).to(self.device.torch_device, self.dtype)

    def add(self, num_tokens: int) -> Runner:
        """A sequence more, with a block table for all of it."""
        qkv, expected = [], []
        for layer in self.layers:
            q = self.normal(num_tokens, self.num_kv_heads * self.group, layer.head_dim)
            k, v = (self.normal(num_tokens, layer.num_kv_heads, layer.head_dim) for _ in range(2))
            qkv.append((q, k, v))
            expected.append(dense(q, k, v, layer.window))
        table = [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]
        self.runners.append(Runner(qkv, expected, table))
        return self.runners[-1]

    def step(self, *counts: int) -> None:
        """Compute the next `counts[i]` tokens of runner i (0: not in this step)."""
        batch = [(runner, count) for runner, count in zip(self.runners, counts, strict=True) if count]
        self.staging.begin()
        self.attention.plan([runner.share(count) for runner, count in batch], self.staging)
        self.staging.upload()
        for layer in range(len(self.layers)):
            q, k, v = (
                torch.cat([r.qkv[layer][part][r.num_done : r.num_done + count] for r, count in batch])
                for part in range(3)
            )
            self.compare(layer, batch, self.attention.run(layer, q, k, v))
        for runner, count in batch:
            runner.num_done += count

    def compare(self, layer: int, batch: Sequence[tuple[Runner, int]], found: Tensor) -> None:
        """`found` [T, Hq, D] is what the shares of `batch` should be in `layer`."""
        expected = torch.cat([r.expected[layer][r.num_done : r.num_done + count] for r, count in batch])
        tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[self.dtype]
        assert found.dtype == self.dtype
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def run_ragged_mix(relay: Relay) -> None:
    """Prompts, chunks, prefix hits and single tokens, in steps of one kind and of several."""
    for num_tokens in (1, 9, 17, 30):
        relay.add(num_tokens)
    relay.step(1, 8, 5, 13)
    relay.step(0, 1, 1, 16)
    relay.step(0, 0, 1, 1)
    relay.step(0, 0, 10, 0)


OpenRelay: TypeAlias = Callable[..., Relay]
"""A `Relay` of the backend under test: of a small shape that most backends compute, but for what is given."""


class AttentionSuite:
    """Derive from it, and give by the fixture `choose` what a package registers. Tests of shapes that it refuses are
    skipped."""

    @pytest.fixture
    def choose(self) -> ChooseAttention:
        """What chooses the backend."""
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> Device:
        """Where it computes."""
        return HostDevice()

    @pytest.fixture
    def open_relay(self, choose: ChooseAttention, device: Device) -> OpenRelay:
        """Opens the relay that the suite runs the backend in."""

        def open_relay(**shape: Any) -> Relay:
            try:
                return Relay(choose, device, **{"group": 2, "head_dim": 64, "dtype": torch.bfloat16, **shape})
            except InvalidSetting as error:
                pytest.skip(error.message)

        return open_relay

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
    @pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (2, 64), (4, 128), (7, 64), (8, 128)])
    def test_ragged_mixes_match_dense_attention(
        self, open_relay: OpenRelay, group: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        run_ragged_mix(open_relay(group=group, head_dim=head_dim, block_size=16, dtype=dtype))

    @pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
    def test_any_block_size_will_do(self, open_relay: OpenRelay, block_size: int) -> None:
        run_ragged_mix(open_relay(block_size=block_size, num_blocks=60))

    @pytest.mark.parametrize(("group", "windows"), [(2, (1, None)), (4, (3, 4)), (2, (None, 7)), (4, (16, 100))])
    def test_each_layer_has_its_own_sliding_window(
        self, open_relay: OpenRelay, group: int, windows: tuple[int | None, ...]
    ) -> None:
        run_ragged_mix(open_relay(group=group, windows=windows))

    def test_layers_may_store_kv_of_different_shapes(self, open_relay: OpenRelay) -> None:
        layers = (LayerKv(2, 64), LayerKv(1, 128, window=5), LayerKv(4, 64), LayerKv(1, 128, window=5))
        relay = open_relay(layers=layers)
        relay.paged.blocks.fill_(torch.nan)
        run_ragged_mix(relay)

    def test_the_size_of_chunks_does_not_matter(self, open_relay: OpenRelay) -> None:
        for chunk in (1, 3, 4, 5, 16):
            relay = open_relay()
            relay.add(16)
            for start in range(0, 16, chunk):
                relay.step(min(chunk, 16 - start))

    def test_single_tokens_may_stand_anywhere_in_a_step(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
        for num_tokens in (24, 20, 23):
            relay.add(num_tokens)
        for counts in ((5, 3, 7), (1, 1, 6), (6, 1, 1), (1, 6, 1), (1, 1, 1), (6, 6, 6)):
            relay.step(*counts)

    def test_two_sequences_attend_to_the_blocks_they_share(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
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

    @pytest.mark.parametrize("group", [1, 4])
    def test_what_a_block_held_before_does_not_matter(self, open_relay: OpenRelay, group: int) -> None:
        relay = open_relay(group=group)
        relay.kv.fill_(torch.nan)
        run_ragged_mix(relay)

    def test_a_step_writes_to_the_blocks_of_its_requests_alone(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
        before = relay.kv.clone()
        runner = relay.add(6)
        relay.step(6)
        untouched = [block for block in range(relay.num_blocks) if block not in runner.block_table]
        assert torch.equal(relay.kv[untouched], before[untouched])
        for layer in range(NUM_LAYERS):
            for part in (0, 1):
                stored = relay.kv[runner.block_table, layer, part].transpose(1, 2).reshape(8, 2, 64)[:6]
                assert torch.equal(stored, runner.qkv[layer][1 + part])

    def test_a_block_table_may_be_longer_than_the_context(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
        runner = relay.add(5)
        runner.block_table += [relay.free.pop(), relay.free.pop()]
        relay.step(4)
        relay.step(1)

    def test_queries_and_keys_may_be_views_of_one_projection(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
        runner = relay.add(6)
        relay.staging.begin()
        relay.attention.plan([SequenceShare(0, 6, runner.block_table)], relay.staging)
        relay.staging.upload()
        for layer in range(NUM_LAYERS):
            joined = torch.cat(runner.qkv[layer], dim=1)
            found = relay.attention.run(layer, joined[:, :4], joined[:, 4:6], joined[:, 6:])
            relay.compare(layer, [(runner, 6)], found)

    def test_a_layer_counts_as_stored_when_its_keys_and_values_are_there(self, open_relay: OpenRelay) -> None:
        relay = open_relay()
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
