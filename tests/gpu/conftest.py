"""The device of these tests, which are skipped where torch sees none. `python -m baton.bench.gpu_check` runs them too.

`BATON_GPU_TESTS=cpu` runs the same code with tiny sizes on the host's cores behind the code paths of a GPU, with
flashinfer's stand-in. What a test records by `within` stands in the table of `baton.bench.gpu_check`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.device.base import Device
from baton.device.choose import open_device
from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.choose import FLASHINFER, AttentionShape, choose_attention
from baton.engine.attention.flashinfer import FlashInferAttention, load_flashinfer
from baton.engine.attention.torch_backend import TorchAttention
from tests.engine.attention.flashinfer_stand_in import CALLS
from tests.gpu.attention import GRAPH_SIZES, MAX_TABLE, MakeBackend, paged_of

DEVICE = os.environ.get("BATON_GPU_TESTS", "cuda")
IS_GPU = DEVICE == "cuda"
IS_QUICK = bool(os.environ.get("BATON_GPU_TESTS_QUICK"))
ENGINE_DEVICE = "cuda" if IS_GPU else "emulated"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of libraries that only a machine with a GPU has are no failures."""
    for item in items:
        if "/tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """As a node opens it."""
    if IS_GPU and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    opened = open_device(ENGINE_DEVICE)
    yield opened
    opened.synchronize()
    opened.close()


@pytest.fixture
def within(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`within(value, bound, unit=, note=, num_cases=)`: what is not a number is never within a bound."""

    def check(value: float, bound: float, **more: Any) -> None:
        for name, each in {"value": value, "bound": bound, **more}.items():
            record_property(name, each)
        assert value <= bound, more.get("note", "")

    return check


@pytest.fixture
def backend(request: pytest.FixtureRequest, device: Device) -> MakeBackend:
    """How to make the attention backend that the test is parametrized with."""
    if request.param == "torch":
        return torch_backend
    if not IS_GPU:
        return stand_in_backend
    try:
        load_flashinfer()
    except Exception as error:  # a package that compiles kernels fails in many ways
        pytest.skip(f"flashinfer: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return flashinfer_backend


def torch_backend(kv: Tensor, num_heads: int, device: Device) -> AttentionBackend:
    """The reference backend."""
    return TorchAttention(paged_of(kv))


def flashinfer_backend(kv: Tensor, num_heads: int, device: Device) -> AttentionBackend:
    """What a node gets with `--attention-backend flashinfer`."""
    paged = paged_of(kv)
    shape = AttentionShape(num_heads, kv.dtype, paged.layout, MAX_TABLE, max(GRAPH_SIZES))
    # not tried out for each of the many cases: they are what tries it
    return choose_attention(FLASHINFER, device, shape, attempt=lambda *_: None).build(paged)


def stand_in_backend(kv: Tensor, num_heads: int, device: Device) -> AttentionBackend:
    """flashinfer's calls on the CPU, behind the code that drives the real ones."""
    workspace = torch.zeros(2**28, dtype=torch.uint8)
    return FlashInferAttention(
        CALLS, paged_of(kv), num_heads=num_heads, workspace=workspace, max_blocks_per_sequence=MAX_TABLE
    )
