"""What a stream of transfers asks of CUDA and in which order, with a stand-in for torch.cuda: no GPU is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.device import events
from baton.device.base import DeviceFailed
from baton.device.cuda_stream import CudaStream

_GPU = torch.device("cuda", 1)


class Cuda:
    """Records the calls it gets. `refusal`: the error of the runtime; `is_lost`: events raise."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusal = 0
        self.is_lost = False
        self.num_late_queries = 0

    def note(self, what: Any) -> None:
        self.asked.append(what)

    def Stream(self, device: torch.device, priority: int) -> str:
        self.asked.append(("stream", device.index, priority))
        return "transfers"

    def set_device(self, device: torch.device) -> None:
        self.asked.append(("set_device", device.index))

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.asked.append(("on", stream))
        yield
        self.asked.append(("off", stream))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.asked.append(("device", device.index))
        yield

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.asked.append(("register", address, num_bytes, flags))
        return self.refusal

    def _unregister(self, address: int) -> int:
        self.asked.append(("unregister", address))
        return self.refusal

    def Event(self) -> Any:
        return SimpleNamespace(record=lambda stream: self.asked.append(("record", stream)), query=self._query)

    def _query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("unspecified launch failure")
        self.num_late_queries -= 1
        return self.num_late_queries < 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    for name in ("Stream", "set_device", "stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(events, "_TorchEvent", stand_in.Event)
    return stand_in


@pytest.fixture
def stream(cuda: Cuda) -> CudaStream:
    return CudaStream(_GPU)


def test_its_priority_is_above_the_engines(cuda: Cuda, stream: CudaStream) -> None:
    stream.enter()
    assert cuda.asked == [("stream", 1, -1), ("set_device", 1)]


def test_copies_are_issued_on_the_stream_and_may_write_a_pool_of_inference_mode(cuda: Cuda, stream: CudaStream) -> None:
    with torch.inference_mode():
        pool = torch.zeros(4, dtype=torch.uint8)
    stream.copy(pool, torch.ones(4, dtype=torch.uint8))
    stream.run(lambda: cuda.note(pool.add_(1).tolist()))
    assert cuda.asked[1:] == [
        ("on", "transfers"),
        ("off", "transfers"),
        ("on", "transfers"),
        [2] * 4,
        ("off", "transfers"),
    ]


def test_an_event_is_behind_what_was_issued(cuda: Cuda, stream: CudaStream) -> None:
    cuda.num_late_queries = 2
    event = stream.record_event()
    assert cuda.asked[1:] == [("record", "transfers")]
    assert not event.is_passed()
    event.wait(10.0)
    assert event.is_passed()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_device_that_does_not_answer_is_a_failed_device(
    cuda: Cuda, stream: CudaStream, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.device.cuda_stream.COPY_TIMEOUT_S", 0.01)
    cuda.num_late_queries, cuda.is_lost = 2**60, is_lost
    with pytest.raises(DeviceFailed, match="launch failure" if is_lost else r"for 0\.01 s"):
        stream.synchronize()


def test_pinned_memory_is_registered_for_every_context_until_it_is_closed(cuda: Cuda, stream: CudaStream) -> None:
    region = np.zeros(64, dtype=np.uint8)
    pin = stream.pin(region)
    assert pin.is_direct
    pin.close()
    pin.close()
    address = region.ctypes.data
    assert cuda.asked[1:] == [("device", 1), ("register", address, 64, 1), ("unregister", address)]


def test_memory_that_the_driver_refuses_is_used_without_a_pin(
    cuda: Cuda, stream: CudaStream, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[torch.device] = []

    def launch(count: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("the error of the runtime, once more")

    monkeypatch.setattr(torch, "zeros", launch)
    cuda.refusal = 2
    with caplog.at_level(logging.WARNING):
        assert not stream.pin(np.zeros(64, dtype=np.uint8)).is_direct
    assert "64 bytes of shared memory could not be pinned (CUDA error 2)" in caplog.text
    assert launched == [_GPU], "the runtime's error is taken here, and not at a later launch of this thread"
