"""The pool's share of a device, by hand-computed readings in MiB."""

from __future__ import annotations

import pytest
import torch

from device.memory import MemoryReading, enough_memory, kv_budget, too_small
from wire.errors import InvalidSetting

MIB = 2**20
MARGIN = 64


def reading(total: int, free: int, reserved: int = 0, peak: int = 0) -> MemoryReading:
    return MemoryReading(total * MIB, free * MIB, reserved * MIB, peak * MIB)


def budget(before: MemoryReading, after: MemoryReading, utilization: float, graphs: int = 0) -> float:
    return kv_budget(before, after, graphs * MIB, utilization) / MIB


def test_a_share_pays_for_context_weights_peak_and_graphs() -> None:
    # 500 MiB outside torch, 15,000 of weights, 2,000 more at the peak, 300 of graphs
    after = reading(80_000, 79_000 - 500 - 15_000, reserved=15_000, peak=17_000)
    found = budget(reading(80_000, 79_000), after, 0.9, graphs=300)
    assert found == 72_000 - 500 - 17_000 - 300 - MARGIN


def test_two_nodes_of_one_device_fit_beside_each_other() -> None:
    # the other node has taken all of its share already
    before = reading(80_000, 80_000 - 36_000)
    after = reading(80_000, before.free // MIB - 500 - 15_000, reserved=15_000, peak=17_000)
    assert budget(before, after, 0.45) == 36_000 - 500 - 17_000 - MARGIN


def test_what_another_process_took_meanwhile_is_not_counted_as_ours() -> None:
    after = reading(80_000, 79_000 - 500 - 15_000 - 20_000, reserved=15_000, peak=17_000)
    assert budget(reading(80_000, 79_000), after, 0.45) == 36_000 - 2_048 - 17_000 - MARGIN


def test_no_more_than_is_free_is_promised() -> None:
    before = reading(80_000, 30_000)
    after = reading(80_000, 30_000 - 500 - 15_000, reserved=15_000, peak=17_000)
    assert budget(before, after, 0.9, graphs=100) == 14_500 - 2_000 - 100 - MARGIN


def test_a_share_that_is_used_up_leaves_nothing() -> None:
    after = reading(80_000, 60_000, reserved=15_000, peak=17_000)
    assert budget(reading(80_000, 79_000), after, 0.2) == 0


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan")])
def test_only_a_share_is_a_utilization(utilization: float) -> None:
    with pytest.raises(InvalidSetting, match="--gpu-memory-utilization"):
        budget(reading(8, 8), reading(8, 8), utilization)


def test_the_error_of_a_pool_that_is_too_small_names_the_numbers() -> None:
    error = too_small(512 * MIB, 2048 * MIB, reading(80 * 1024, 40 * 1024), 0.3)
    text = "0.3 leaves 0.50 GiB for KV on a device of 80.0 GiB (40.0 GiB free after loading), one request of "
    assert text in str(error)
    assert "needs 2.00 GiB" in str(error)


def test_a_start_without_enough_memory_is_a_setting_that_does_not_fit() -> None:
    with pytest.raises(InvalidSetting, match=r"Tried to allocate 2 GiB\.; lower --num-blocks"), enough_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")
