"""The memory of a pool as nixl is told of it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from baton.kvtransfer.transports.nixl.memory import VRAM, BlockRuns, Region, region_of
from baton.wire.errors import InvalidSetting
from tests.kvtransfer.transports.nixl.gpu_stand_ins import FakeTensor, a_segment


def test_a_pool_on_a_gpu_is_described_with_its_device() -> None:
    region = region_of(FakeTensor())
    assert region == Region(2**40, 4 * 4096, 4, VRAM, 3)
    assert region.whole().tolist() == [[2**40, 4 * 4096, 3]]
    assert region.blocks().tolist() == [[2**40 + i * 4096, 4096, 3] for i in range(4)]


@pytest.mark.parametrize(
    ("found", "backend", "may"),
    [
        ([a_segment()], "native", True),
        ([a_segment(is_expandable=True)], "native", False),
        ([a_segment(is_expandable=True, device=2), a_segment()], "native", True),
        ([a_segment(is_expandable=True, address=2**40 + 4096), a_segment()], "native", True),
        ([], "native", True),
        ([a_segment()], "cudaMallocAsync", False),
    ],
)
def test_memory_that_cuda_ipc_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    segments: list[dict[str, Any]],
    found: list[dict[str, Any]],
    backend: str,
    may: bool,
) -> None:
    segments += found
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: backend)
    with contextlib.nullcontext() if may else pytest.raises(InvalidSetting, match="expandable_segments"):
        region_of(FakeTensor()).require_shareable()


def test_runs_of_blocks_are_described_one_after_the_other() -> None:
    starts, lengths = (np.array(each, dtype=np.uint64) for each in ((100, 300), (8, 16)))
    runs = BlockRuns(Region(0, 4 * 1024, 4, VRAM, 3), 1024, starts, lengths)
    assert runs.of([3, 0]).tolist() == [[3172, 8, 3], [3372, 16, 3], [100, 8, 3], [300, 16, 3]]
    assert runs.of([]).shape == (0, 3)
    with pytest.raises(ValueError, match="no such block"):
        runs.of([0, 4])


def test_a_pool_that_is_none_is_refused() -> None:
    for what in (
        np.zeros(16, dtype=np.uint8),
        np.zeros((4, 4), dtype=np.uint16),
        np.zeros((8, 8), dtype=np.uint8)[:, ::2],
    ):
        with pytest.raises(InvalidSetting, match="contiguous"):
            region_of(what)


@pytest.mark.parametrize(("offsets", "sizes"), [((0, 8), (8,)), ((8,), (1017,)), ((0, 1024), (8, 1))])
def test_bytes_that_a_block_does_not_have_are_no_runs(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    region = Region(2**40, 4 * 1024, 4, VRAM, 3)
    assert region.runs((0, 8), (8, 1016)).of([1]).tolist() == [[2**40 + 1024, 8, 3], [2**40 + 1032, 1016, 3]]
    with pytest.raises(ValueError, match="no runs of bytes"):
        region.runs(offsets, sizes)


def test_a_pool_in_host_memory_has_no_device() -> None:
    pool = np.zeros((4, 1024), dtype=np.uint8)
    assert region_of(pool) == Region(pool.ctypes.data, 4096, 4)
    for empty in (pool[:0], pool[:, :0]):
        with pytest.raises(InvalidSetting, match="contiguous"):
            region_of(empty)


def test_what_cuda_is_asked_for_is_asked_for_memory_of_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    for name in ("bind_context", "synchronize"):
        monkeypatch.setattr(f"baton.device.cuda_context.{name}", lambda index, name=name: asked.append((name, index)))
    for region in (Region(4096, 4096, 1), region_of(FakeTensor())):
        region.enter()
        region.settle()
        assert len(asked) == (2 if region.kind == VRAM else 0)
    assert asked == [("bind_context", 3), ("synchronize", 3)]
    Region(4096, 4096, 1).require_shareable()
