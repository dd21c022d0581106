"""The checks of attention pass what is right and fail what is subtly wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bench.gpu_check.attention_cases import (
    BATCHES,
    ERROR_BOUNDS,
    GROUPS,
    NUM_KV_HEADS,
    WINDOWS,
    AttentionCase,
    attention_cases,
)
from bench.gpu_check.attention_process import (
    MAX_TABLE,
    AttentionBench,
    Inputs,
    check_case,
    check_graph,
    graph_inputs,
    make_inputs,
    paged_of,
    torch_backend,
)
from bench.gpu_check.parts_process import Setup
from bench.gpu_check.rows import Verdict
from device.base import Device, Staging
from device.emulated import EmulatedDevice
from device.host import HostDevice
from engine.attention.base import AttentionBackend, LayerStored, SequenceShare
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.torch_backend import TorchAttention
from tests.engine.attention.flashinfer_stand_in import CALLS

CPU = torch.device("cpu")
BOUND = ERROR_BOUNDS["bfloat16"]


class Wrapped:
    """A right backend with something wrong about it."""

    def __init__(self, kv: Tensor, windows: Sequence[int | None] = WINDOWS) -> None:
        self.kv = kv
        self.right = TorchAttention(paged_of(kv, windows))

    def plan(self, shares: Sequence[SequenceShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
        self.right.plan(shares, staging, layer_stored)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.right.run(layer, q, k, v)

    def for_graph(self, num_sequences: int) -> AttentionBackend | None:
        return None


class ForgetsTheFirstToken(Wrapped):
    def plan(self, shares: Sequence[SequenceShare], staging: Staging, layer_stored: LayerStored | None = None) -> None:
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


def test_every_case_has_other_inputs_and_a_poisoned_pool() -> None:
    one, other = (make_inputs(AttentionCase(1, 16, "decode"), "float16", 64, CPU, seed) for seed in (0, 1))
    assert not torch.equal(one.fused, other.fused)
    assert bool(one.kv.isnan().any())
    assert bool(one.exact.isfinite().all())


def stand_in(kv: Tensor, num_heads: int, device: Device) -> AttentionBackend:
    """flashinfer's calls on the CPU, behind the code that drives the real ones."""
    workspace = torch.zeros(2**28, dtype=torch.uint8)
    return FlashInferAttention(
        CALLS, paged_of(kv), num_heads=num_heads, workspace=workspace, max_blocks_per_sequence=MAX_TABLE
    )


@pytest.mark.parametrize("case", attention_cases(quick=True)[::3], ids=str)
def test_the_grid_runs_over_flashinfers_stand_in(case: AttentionCase) -> None:
    device = EmulatedDevice()
    inputs = make_inputs(case, "bfloat16", 64, CPU, seed=5)
    error, num_wrong = check_case(stand_in, inputs, device)
    assert error <= BOUND
    assert num_wrong == 0


@pytest.mark.parametrize("group", GROUPS)
def test_recorded_plans_run_over_flashinfers_stand_in(group: int) -> None:
    error = check_graph(stand_in, graph_inputs(group, 3, CPU), EmulatedDevice())
    assert error is not None
    assert error <= BOUND


def test_a_recording_that_reads_the_first_plan_again_is_seen() -> None:
    class FrozenPlan(Wrapped):
        def for_graph(self, num_sequences: int) -> AttentionBackend:
            return self

        def plan(
            self, shares: Sequence[SequenceShare], staging: Staging, layer_stored: LayerStored | None = None
        ) -> None:
            if not hasattr(self, "first"):
                self.first = shares
            super().plan(self.first, staging, layer_stored)

    error = check_graph(lambda kv, _heads, _device: FrozenPlan(kv), graph_inputs(4, 3, CPU), EmulatedDevice())
    assert error is not None
    assert not error <= BOUND


def test_a_backend_that_cannot_be_recorded_says_so() -> None:
    assert check_graph(torch_backend, graph_inputs(1, 1, CPU), EmulatedDevice()) is None


def test_a_graph_is_for_decode_steps_of_one_size() -> None:
    inputs = [graph_inputs(1, size, CPU)[0] for size in (1, 3)]
    with pytest.raises(ValueError, match="one size"):
        check_graph(torch_backend, inputs, EmulatedDevice())


def test_a_wrong_case_makes_a_red_row_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.gpu_check.attention_process as attention

    def with_one_wrong(make: object, inputs: Inputs, device: Device) -> tuple[float, int]:
        return (math.nan if inputs.num_heads == 7 * NUM_KV_HEADS else 0.001), 0

    monkeypatch.setattr(attention, "check_case", with_one_wrong)
    rows = AttentionBench(Setup("cpu", is_quick=True)).check("bfloat16/64")
    assert rows[0].verdict == Verdict.WRONG
    assert rows[0].num_cases == len(attention_cases(quick=True))
    assert [row.verdict for row in rows[2:]] == [Verdict.WRONG] * 3
    assert all("group 7" in row.case for row in rows[2:])
