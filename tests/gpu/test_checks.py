"""The checks of attention fail what is subtly wrong. They run everywhere, on the host's cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from baton.device.base import Device, Staging
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.engine.attention.base import AttentionBackend, LayerStored, PlannedShare
from baton.engine.attention.torch_backend import TorchAttention
from tests.gpu.attention import (
    BATCHES,
    ERROR_BOUNDS,
    WINDOWS,
    AttentionCase,
    attention_cases,
    check_case,
    check_graph,
    graph_inputs,
    make_inputs,
    paged_of,
    worst,
)
from tests.gpu.conftest import stand_in_backend, torch_backend

CPU = torch.device("cpu")
BOUND = ERROR_BOUNDS["bfloat16"]


class Wrapped:
    """A right backend with something wrong about it."""

    def __init__(self, kv: Tensor, windows: Sequence[int | None] = WINDOWS) -> None:
        self.kv = kv
        self.right = TorchAttention(paged_of(kv, windows))

    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        self.right.plan(shares, staging, layer_stored)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.right.run(layer, q, k, v)

    def for_graph(self, num_sequences: int) -> AttentionBackend | None:
        return None


class ForgetsTheFirstToken(Wrapped):
    def plan(self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        super().plan(shares, staging, layer_stored)
        for share in shares:
            if share.start:
                self.kv[share.block_table[0], :, :, :, 0] = 0


class StoresNothing(Wrapped):
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = self.kv.clone()
        out = super().run(layer, q, k, v)
        self.kv.copy_(before)
        return out


class SwapsTwoHeads(Wrapped):
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().run(layer, q, k, v).flip(1)


class LeavesARowUnwritten(Wrapped):
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().run(layer, q, k, v)
        out[-1, -1, -1] = math.nan
        return out


class WritesIntoAnotherBlock(Wrapped):
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().run(layer, q, k, v)
        unused = int(self.kv.isnan().flatten(1).all(1).nonzero()[0])
        self.kv[unused, layer, 0, 0, 0, 0] = 1.0
        return out


def error_of(make: Callable[[Tensor], AttentionBackend], case: AttentionCase) -> tuple[float, int]:
    inputs = make_inputs(case, "bfloat16", 64, CPU, seed=3)
    return check_case(lambda kv, _heads, _device: make(kv), inputs, HostDevice())


@pytest.mark.parametrize("batch", BATCHES)
def test_the_right_backend_passes(batch: str) -> None:
    error, num_wrong = error_of(Wrapped, AttentionCase(4, 16, batch))
    assert 0 < error <= BOUND
    assert num_wrong == 0


@pytest.mark.parametrize(
    "make",
    [
        ForgetsTheFirstToken,
        SwapsTwoHeads,
        LeavesARowUnwritten,
        lambda kv: Wrapped(kv, (None, 36)),
        lambda kv: Wrapped(kv, (None, None)),
        lambda kv: Wrapped(kv, (37, 37)),
    ],
    ids=["first token", "heads", "unwritten", "window by one", "no window", "window everywhere"],
)
def test_a_wrong_result_is_seen(make: Callable[[Tensor], AttentionBackend]) -> None:
    error, _ = error_of(make, AttentionCase(4, 16, "mixed"))
    assert not error <= BOUND


@pytest.mark.parametrize("make", [StoresNothing, WritesIntoAnotherBlock])
def test_a_wrong_pool_is_seen(make: Callable[[Tensor], AttentionBackend]) -> None:
    _, num_wrong = error_of(make, AttentionCase(1, 16, "prefix"))
    assert num_wrong > 0


def test_a_recording_that_reads_the_first_plan_again_is_seen() -> None:
    class FrozenPlan(Wrapped):
        def for_graph(self, num_sequences: int) -> AttentionBackend:
            return self

        def plan(
            self, shares: Sequence[PlannedShare], staging: Staging, layer_stored: LayerStored | None = None
        ) -> None:
            if not hasattr(self, "first"):
                self.first = shares
            super().plan(self.first, staging, layer_stored)

    def frozen(kv: Tensor, num_heads: int, device: Device) -> AttentionBackend:
        return FrozenPlan(kv)

    inputs = graph_inputs(4, 3, CPU)
    error = check_graph(frozen, inputs, EmulatedDevice())
    assert error is not None
    assert not error <= BOUND
    right = check_graph(stand_in_backend, inputs, EmulatedDevice())
    assert right is not None
    assert right <= BOUND
    assert check_graph(torch_backend, inputs, EmulatedDevice()) is None


def test_what_is_not_a_number_is_the_worst() -> None:
    assert worst({"a": 1.0, "b": math.nan, "c": 2.0}) == "b"
    assert worst({"a": 1.0, "c": 2.0}) == "c"


@pytest.mark.parametrize("quick", [False, True])
def test_batches_reach_the_borders_of_blocks(quick: bool) -> None:
    for case in attention_cases(quick=quick):
        shares, size = case.shares(), case.block_size
        assert all(share.num_shared <= share.start and share.num_shared % size == 0 for share in shares)
        contexts = {share.start + share.num_tokens for share in shares}
        if case.batch in ("decode", "mixed"):
            assert {size, size - 1} <= contexts
        if case.batch in ("prefix", "mixed"):
            assert sum(share.num_shared > 0 for share in shares) >= 2
