"""The emulated device does what a GPU does where it matters: graphs replay operations, not Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.device.emulated import EmulatedDevice


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


def network(x: Tensor, weight: Tensor, memory: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Views, operations in place, operations with out=, indexed writes: what a decoder does."""
    hidden = F.linear(x, weight)
    hidden.add_(x)
    left, right = hidden[:, :2], hidden[:, 2:]
    memory.index_copy_(0, rows, right)
    total = torch.empty_like(left)
    torch.mul(left, memory.index_select(0, rows), out=total)
    return F.rms_norm(total, (2,)), hidden.t()


@torch.inference_mode()
def test_a_replay_computes_anew_from_what_its_inputs_hold_then(device: EmulatedDevice) -> None:
    x, weight, memory = torch.randn(3, 4), torch.randn(4, 4), torch.zeros(9, 2)
    rows = torch.tensor([1, 5, 7])
    graph, outputs = device.record(lambda: network(x, weight, memory, rows))
    for step in range(3):
        x.copy_(torch.randn(3, 4))
        rows.copy_(torch.tensor([step, 4, 8 - step]))
        expected_memory = memory.clone()
        expected = [output.clone() for output in network(x.clone(), weight, expected_memory, rows.clone())]
        graph.replay()
        assert all(torch.equal(found, right) for found, right in zip(outputs, expected, strict=True))
        assert torch.equal(memory, expected_memory)
    assert device.num_graphs == 1


@torch.inference_mode()
def test_values_of_python_are_part_of_the_recording(device: EmulatedDevice) -> None:
    x, factor = torch.ones(2), [2.0]
    graph, output = device.record(lambda: x * factor[0])
    factor[0] = 3.0
    graph.replay()
    assert output.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x.sum().item(), "asks the device for a value"),
        (lambda x: torch.nonzero(x), "asks the device for a value"),
        (lambda x: x[x > 0], "with a mask"),
        (lambda x: x + torch.tensor([1.0]), "brings values of the host"),
        (lambda x: torch.equal(x, x), "asks the device for a value"),
    ],
    ids=["item", "nonzero", "mask", "literal", "equal"],
)
def test_what_a_gpu_cannot_record_is_refused(device: EmulatedDevice, run: Callable[[Tensor], Any], reason: str) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=reason):
        device.record(lambda: run(torch.ones(3)))
    assert device.num_graphs == 0


def test_fetched_values_are_those_of_the_moment(device: EmulatedDevice) -> None:
    values = torch.arange(3)
    arrival = device.fetch([values, values * 2])
    values.zero_()
    assert [array.tolist() for array in arrival.wait()] == [[0, 1, 2], [0, 2, 4]]


def test_notices_come_from_another_thread_in_order(device: EmulatedDevice) -> None:
    heard: list[tuple[int, int]] = []
    for number in range(3):
        device.notify(lambda number=number: heard.append((number, threading.get_ident())))  # type: ignore[misc]
    device.settle()
    assert [number for number, _ in heard] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in heard}
