"""Staging: where arrays lie, and that a device sees them from the upload on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.device.base import Array, Device
from baton.device.emulated import EmulatedDevice
from baton.device.host import HostDevice
from baton.device.staging import ALIGNMENT, StagedMemory, StagingLayout, staged_bytes

DTYPES = (np.bool_, np.uint8, np.int32, np.int64, np.float32, np.float64)
ARRAYS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 20)), max_size=12)


def array(dtype: type[np.generic], count: int) -> Array:
    return np.random.default_rng(count).integers(0, 2, count).astype(dtype)


@given(ARRAYS)
def test_places_are_aligned_apart_and_independent_of_lengths(specs: list[tuple[type[np.generic], int, int]]) -> None:
    layout = StagingLayout(2**20)
    full = [layout.place(array(dtype, count + spare), count + spare) for dtype, count, spare in specs]
    num_full_bytes = layout.num_used_bytes
    layout.reset()
    short = [layout.place(array(dtype, count), count + spare) for dtype, count, spare in specs]
    assert [place.begin for place in short] == [place.begin for place in full]
    assert layout.num_used_bytes <= num_full_bytes
    assert all(place.begin % ALIGNMENT == 0 for place in full)
    ends = [0, *(place.end for place in full)]
    assert all(place.begin >= end for place, end in zip(full, ends, strict=False))
    total = sum(staged_bytes(count + spare, dtype) for dtype, count, spare in specs)
    assert num_full_bytes <= total


def test_what_does_not_fit_is_refused() -> None:
    layout = StagingLayout(100)
    layout.place(np.zeros(8, np.int64), 8)
    with pytest.raises(ValueError, match="100 bytes of staging memory"):
        layout.place(np.zeros(10, np.int64), 0)
    with pytest.raises(ValueError, match="3 values do not fit a capacity of 2"):
        StagingLayout(100).place(np.zeros(3, np.int32), 2)


def test_memory_need_not_be_a_whole_number_of_values() -> None:
    memory = StagedMemory(torch.zeros(77, dtype=torch.uint8), torch.zeros(77, dtype=torch.uint8))
    assert len(memory.put(np.ones(8, np.int64), 8)) == 8
    assert len(memory.put(np.ones(13, np.bool_), 13)) == 13
    with pytest.raises(ValueError, match="77 bytes of staging memory"):
        memory.put(np.ones(1, np.bool_), 0)


@pytest.mark.parametrize("make_device", [HostDevice, EmulatedDevice])
@pytest.mark.parametrize("dtype", DTYPES)
def test_after_the_upload_views_hold_what_was_put(make_device: Callable[[], Device], dtype: type[np.generic]) -> None:
    staging = make_device().staging(4096)
    for count in (0, 1, 7):
        staging.begin()
        values = [array(dtype, count), array(np.int32, 3), array(dtype, count + 1)]
        views = [staging.put(each, capacity=len(each) + 2) for each in values]
        staging.upload()
        for view, each in zip(views, values, strict=True):
            assert np.array_equal(view.numpy(), each)
            assert view.numpy().dtype == each.dtype


def test_a_device_does_not_see_values_before_the_upload_nor_those_of_the_last_step() -> None:
    staging = EmulatedDevice().staging(1024)
    values = np.arange(5)
    staging.begin()
    view = staging.put(values)
    assert not np.array_equal(view.numpy(), values)
    staging.upload()
    values += 1
    assert np.array_equal(view.numpy(), np.arange(5))
    staging.begin()
    assert not np.array_equal(view.numpy(), np.arange(5))


def test_equal_capacities_get_equal_addresses() -> None:
    staging = EmulatedDevice().staging(4096)
    addresses = []
    for count in (1, 5, 3):
        staging.begin()
        views = [
            staging.put(np.zeros(count, np.int32), 5),
            staging.put(np.zeros(count), 8),
            staging.put(np.zeros(count)),
        ]
        addresses.append([view.data_ptr() for view in views])
    assert addresses[0] == addresses[1] == addresses[2]


def test_bytes_behind_the_last_value_are_not_copied() -> None:
    staging = EmulatedDevice().staging(2**16)
    staging.begin()
    view = staging.put(np.zeros(4, np.uint8), capacity=2**15)
    staging.upload()
    assert torch.equal(view, torch.zeros(4, dtype=torch.uint8))
    assert staging._device[4:].eq(staging._device[-1]).all()
