from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from engine.attention.base import SequenceShare
from engine.attention.torch_backend import TorchAttention
from engine.device.host import HostStaging

NUM_LAYERS = 2


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole sequence in float64, one query and one head at a time."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for position, head in itertools.product(range(num_tokens), range(num_heads)):
        first = 0 if window is None else max(0, position + 1 - window)
        keys = k[first : position + 1, head // group].double()
        weights = torch.softmax(keys @ q[position, head].double() / math.sqrt(head_dim), dim=0)
        out[position, head] = weights @ v[first : position + 1, head // group].double()
    return out


@dataclass
class Sequence:
    """A sequence with random q, k, v per layer, and the dense result that every share of it is compared with."""

    qkv: list[tuple[Tensor, Tensor, Tensor]]
    expected: list[Tensor]
    block_table: list[int]
    num_done: int = 0


@dataclass
class Relay:
    """Runs shares of sequences through the backend and compares each with the dense result."""

    group: int = 1
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = (None, None)
    num_kv_heads: int = 2
    num_blocks: int = 40
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.kv = self.normal(self.num_blocks, NUM_LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim) * 9
        self.attention = TorchAttention(self.kv, self.windows)
        self.free = torch.randperm(self.num_blocks, generator=self.random).tolist()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def add(self, num_tokens: int) -> Sequence:
        qkv, expected = [], []
        for window in self.windows:
            q = self.normal(num_tokens, self.num_kv_heads * self.group, self.head_dim)
            k, v = (self.normal(num_tokens, self.num_kv_heads, self.head_dim) for _ in range(2))
            qkv.append((q, k, v))
            expected.append(dense(q, k, v, window))
        table = [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]
        self.sequences.append(Sequence(qkv, expected, table))
        return self.sequences[-1]

    def step(self, *counts: int) -> None:
        """Compute the next `counts[i]` tokens of sequence i (0: not in this step)."""
        pairs = list(zip(self.sequences, counts, strict=True))
        batch = [(sequence, sequence.num_done, count) for sequence, count in pairs if count]
        shares = [SequenceShare(start, count, sequence.block_table) for sequence, start, count in batch]
        self.attention.plan(shares, HostStaging())
        tolerance = 2e-5 if self.dtype == torch.float32 else 3e-2
        for layer in range(NUM_LAYERS):
            q, k, v = (
                torch.cat([sequence.qkv[layer][part][start : start + count] for sequence, start, count in batch])
                for part in range(3)
            )
            expected = torch.cat([sequence.expected[layer][start : start + count] for sequence, start, count in batch])
            found = self.attention.run(layer, q, k, v)
            assert found.dtype == self.dtype
            torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        for sequence, _, count in batch:
            sequence.num_done += count


def run_ragged_mix(relay: Relay) -> None:
    for num_tokens in (1, 9, 17, 30):
        relay.add(num_tokens)
    relay.step(1, 8, 5, 13)
    relay.step(0, 1, 1, 16)
    relay.step(0, 0, 1, 1)
    relay.step(0, 0, 10, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_ragged_mixes_of_prompts_chunks_and_decodes_match_dense_attention(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    run_ragged_mix(Relay(group, head_dim, block_size, dtype))


@pytest.mark.parametrize("windows", [(1, None), (3, 4), (None, 7), (16, 100)])
def test_each_layer_has_its_own_sliding_window(windows: tuple[int | None, ...]) -> None:
    run_ragged_mix(Relay(group=2, windows=windows))


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
def test_the_size_of_chunks_does_not_matter(chunk: int) -> None:
    relay = Relay(group=2)
    relay.add(16)
    for start in range(0, 16, chunk):
        relay.step(min(chunk, 16 - start))


def test_two_sequences_attend_to_the_blocks_they_share() -> None:
    relay = Relay(block_size=4)
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


@pytest.mark.parametrize("group", [1, 2])
def test_what_a_block_held_before_does_not_matter(group: int) -> None:
    relay = Relay(group)
    relay.kv.fill_(torch.nan)
    run_ragged_mix(relay)


def test_a_step_writes_to_the_blocks_of_its_requests_alone() -> None:
    relay = Relay(block_size=4)
    before = relay.kv.clone()
    sequence = relay.add(6)
    relay.step(6)
    untouched = [block for block in range(relay.num_blocks) if block not in sequence.block_table]
    assert torch.equal(relay.kv[untouched], before[untouched])
    for layer in range(NUM_LAYERS):
        stored = relay.kv[sequence.block_table, layer, 0].transpose(1, 2).reshape(8, 2, 16)[:6]
        assert torch.equal(stored, sequence.qkv[layer][1])


def test_a_block_table_may_be_longer_than_the_context() -> None:
    relay = Relay()
    sequence = relay.add(5)
    sequence.block_table += [relay.free.pop(), relay.free.pop()]
    relay.step(4)
    relay.step(1)


def test_queries_and_keys_may_be_views_of_one_projection() -> None:
    relay = Relay(group=2, head_dim=16)
    sequence = relay.add(6)
    relay.attention.plan([SequenceShare(0, 6, sequence.block_table)], HostStaging())
    for layer in range(NUM_LAYERS):
        joined = torch.cat(sequence.qkv[layer], dim=1)
        found = relay.attention.run(layer, joined[:, :4], joined[:, 4:6], joined[:, 6:])
        torch.testing.assert_close(found.double(), sequence.expected[layer], atol=2e-5, rtol=2e-5)
