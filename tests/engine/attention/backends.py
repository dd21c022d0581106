"""Baton's own attention backends by name: torch, a dispatch level of the CPU kernels, flashinfer on its stand-in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.device.base import Device
from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.choose import AttentionChoice, AttentionShape, ChooseAttention
from baton.engine.attention.flashinfer import FlashInferAttention
from baton.engine.attention.flashinfer_limits import float_workspace_bytes
from baton.engine.attention.native_backend import NativeAttention
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.attention.torch_backend import TorchAttention
from baton.testing.attention import MAX_BLOCKS, MAX_SEQUENCES
from baton.wire.layout import KvLayout, LayerKv
from tests.engine.attention import flashinfer_stand_in as stand_in
from tests.engine.native.compiled import kernels


def backend(name: str) -> ChooseAttention:
    """As the suite takes it."""

    def choose(_: Device, shape: AttentionShape) -> AttentionChoice:
        return AttentionChoice(name, 0, lambda paged: make_backend(name, paged, shape.num_heads))

    return choose


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
