"""Where tensors are, checked without a GPU: tensors of a fake CUDA device refuse to be mixed with those of the host,
and to give their values away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from baton.engine.attention.base import SequenceShare
from tests.engine.attention.backends import make_backend, paged_of

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
CUDA = torch.device("cuda", 0)
SHARES = [
    SequenceShare(8, 1, [5, 6, 7]),
    SequenceShare(3, 1, [1]),
    SequenceShare(0, 6, [2, 3]),
    SequenceShare(4, 1, [4, 8]),
]


class FakeStaging:
    """Views on a device that is not there. Their values come with the upload: reading one before fails the test."""

    def begin(self) -> None:
        """See `Staging.begin`."""

    def put(self, values: np.ndarray, capacity: int = 0) -> Tensor:
        """See `Staging.put`."""
        assert values.ndim == 1
        dtype = torch.from_numpy(np.empty(0, dtype=values.dtype)).dtype
        return torch.empty(max(capacity, len(values)), dtype=dtype, device=CUDA)[: len(values)]

    def upload(self) -> None:
        """See `Staging.upload`."""


class Indexing(TorchFunctionMode):
    """`tensor[...]` out of operations: a torch without CUDA has no subscript for tensors of a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and args[0].device == CUDA:
            return _item(args[0], args[1])
        if func is Tensor.__setitem__ and args[0].device == CUDA:
            # not the values, but what is asked of them: same device, same shape
            return _item(args[0], args[1]).mul_(args[2])
        return func(*args, **(kwargs or {}))


def _item(view: Tensor, index: Any) -> Tensor:
    items = index if isinstance(index, tuple) else (index,)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        rest = len(view.shape) - sum(item is not None for item in items) + 1
        items = (*items[:place], *[slice(None)] * rest, *items[place + 1 :])
    dimension = 0
    for item in items:
        if isinstance(item, int):
            view = view.select(dimension, item)
            continue
        if item is None:
            view = view.unsqueeze(dimension)
        elif item != slice(None):
            first, last, _ = item.indices(view.shape[dimension])
            view = view.narrow(dimension, first, max(0, last - first))
        dimension += 1
    return view


@pytest.fixture(autouse=True)
def _fake_device() -> Iterator[None]:
    with FakeTensorMode(), Indexing():
        yield


def qkv_of(num_tokens: int) -> tuple[Tensor, ...]:
    joined = torch.empty(num_tokens, 4 + 2 + 2, 64, dtype=torch.bfloat16, device=CUDA)
    return torch.split(joined, [4, 2, 2], dim=1)


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_a_step_stays_on_the_device_and_asks_it_for_nothing(backend: str) -> None:
    kv = torch.empty(10, 2, 2, 2, 4, 64, dtype=torch.bfloat16, device=CUDA)
    attention = make_backend(backend, paged_of(kv, (None, 3)), num_heads=4)
    for shares in (SHARES, SHARES[:2], SHARES[2:]):
        attention.plan(shares, FakeStaging())
        q, k, v = qkv_of(sum(share.num_tokens for share in shares))
        for layer in range(2):
            out = attention.run(layer, q, k, v)
            assert out.device == CUDA
            assert out.shape == q.shape


def test_a_recorded_step_stays_on_the_device() -> None:
    kv = torch.empty(10, 2, 2, 2, 4, 64, dtype=torch.bfloat16, device=CUDA)
    attention = make_backend("flashinfer", paged_of(kv, (None, 3)), num_heads=4).for_graph(2)
    assert attention is not None
    q, k, v = qkv_of(2)
    for _ in range(2):
        attention.plan(SHARES[:2], FakeStaging())
        assert [attention.run(layer, q, k, v).device for layer in range(2)] == [CUDA, CUDA]
