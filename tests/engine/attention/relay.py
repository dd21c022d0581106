"""Random sequences that run through an attention backend share by share, each compared with dense attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.device.emulated import EmulatedStaging
from baton.engine.attention.base import AttentionBackend, SequenceShare, attention_staging_bytes
from baton.engine.attention.flashinfer import FlashInferAttention
from baton.engine.attention.flashinfer_limits import float_workspace_bytes
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.wire.layout import KvLayout, LayerKv
from tests.engine.attention import flashinfer_stand_in as stand_in
from tests.engine.native.compiled import kernels

NUM_LAYERS = 2
MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS = 256, 8, 32


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one whole sequence in float64."""
    num_tokens, num_heads, head_dim = q.shape
    keys, values = (x.double().repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / math.sqrt(head_dim)
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    is_unseen = (distance < 0) | (distance >= (num_tokens if window is None else window))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_unseen, -torch.inf).softmax(-1), values)


def paged_of(kv: Tensor, windows: Sequence[int | None]) -> PagedKv:
    """The pool [B, L, 2, Hkv, block_size, D] as backends take it; `windows`: one entry per layer."""
    dtype = str(kv.dtype).removeprefix("torch.")
    layers = [LayerKv(kv.shape[3], kv.shape[5], window) for window in windows]
    return PagedKv(KvLayout.of_layers(dtype, kv.shape[4], layers), kv.flatten(1))


def make_backend(name: str, paged: PagedKv, num_heads: int) -> AttentionBackend:
    """The torch backend, the CPU kernels' at a dispatch level, or the flashinfer backend on its stand-in."""
    if name == "torch":
        return TorchAttention(paged)
    if name != "flashinfer":
        return NativeAttention(kernels(name), paged, num_heads)
    num_bytes = max(
        float_workspace_bytes(
            num_heads, group.kv.num_kv_heads, group.kv.head_dim, stand_in.NUM_PROCESSORS, MAX_SEQUENCES
        )
        for group in paged.layout.groups
    )
    workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=paged.blocks.device)
    return FlashInferAttention(
        stand_in.CALLS, paged, num_heads=num_heads, workspace=workspace, max_blocks_per_sequence=MAX_BLOCKS
    )


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
    what they are given; without them there is one for each of `windows`, all of one shape.
    """

    backend: str = "torch"
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
        self.attention = make_backend(self.backend, self.paged, self.num_kv_heads * self.group)
        self.staging = EmulatedStaging(attention_staging_bytes(MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS))
        self.free = torch.randperm(self.num_blocks, generator=self.random).tolist()

    @property
    def kv(self) -> Tensor:
        """[B, L, 2, Hkv, block_size, D] of layers that have one shape."""
        return self.paged.blocks.view(-1, len(self.layers), 2, self.num_kv_heads, self.block_size, self.head_dim)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def add(self, num_tokens: int) -> Runner:
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
