"""The promises of every pool, also of pools on a device that does its work late."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.kvtransfer.integrity import DOT64, NONE, XXH3
from baton.kvtransfer.pools import device
from baton.kvtransfer.pools.base import KvPool, Lent
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.transports.base import Blocks
from tests.kvtransfer.late_stream import LateStream, late_pool

_NUM_BLOCKS, _BLOCK_BYTES = 24, 2**12
_KINDS = [HostPool, lambda blocks: DevicePool(torch.from_numpy(blocks)), late_pool]


@pytest.fixture(autouse=True)
def slots_of_four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small staging slots, so that a few small blocks fill all slots of a device's pool."""
    monkeypatch.setattr(device, "_SLOT_BYTES", 4 * _BLOCK_BYTES)


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(1).integers(0, 256, (_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture(params=_KINDS, ids=["host", "device", "late device"])
def pool(request: pytest.FixtureRequest, blocks: Blocks) -> KvPool:
    build: Callable[[Blocks], KvPool] = request.param
    return build(blocks)


@pytest.fixture
def stream() -> LateStream:
    return LateStream(patience=50)


@pytest.fixture
def late(blocks: Blocks, stream: LateStream) -> DevicePool:
    return DevicePool(torch.from_numpy(blocks), stream)


def random_payload(num_blocks: int) -> Blocks:
    return np.random.default_rng(9).integers(0, 256, (num_blocks, _BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("block_ids", [[0], [3, 4, 5, 9, 2], [7, 7, 7], list(range(_NUM_BLOCKS)), []])
def test_a_read_copies_the_named_blocks_and_nothing_else(pool: KvPool, blocks: Blocks, block_ids: list[int]) -> None:
    into = np.full((len(block_ids) + 1, _BLOCK_BYTES), 0xA5, dtype=np.uint8)
    pool.read(block_ids, into[: len(block_ids)])
    assert (into[:-1] == blocks[block_ids]).all()
    assert (into[-1] == 0xA5).all()


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("block_ids", [[0], [3, 4, 5, 9, 2], list(range(_NUM_BLOCKS)), []])
def test_written_blocks_are_in_place_once_the_pool_has_settled(
    pool: KvPool, blocks: Blocks, block_ids: list[int], is_direct: bool
) -> None:
    payload, expected = random_payload(len(block_ids)), blocks.copy()
    expected[block_ids] = payload
    pool.write(block_ids, payload, is_direct=is_direct)
    pool.settle()
    assert (blocks == expected).all()


def test_the_source_of_a_write_may_change_before_the_blocks_are_in_place(pool: KvPool, blocks: Blocks) -> None:
    # twenty blocks: each staging slot is used again and again
    payload = random_payload(20)
    expected = payload.copy()
    for first in range(0, 20, 5):
        pool.write(range(first, first + 5), payload[first : first + 5])
        payload[first : first + 5] = 0
    pool.settle()
    assert (blocks[:20] == expected).all()


@pytest.mark.parametrize("block_ids", [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 1, 8, 2, 7, 3], list(range(_NUM_BLOCKS))])
def test_an_outlet_lends_the_bytes_in_order_and_in_frames(pool: KvPool, blocks: Blocks, block_ids: list[int]) -> None:
    outlet = pool.outlet(4)
    assert outlet.has_room(len(block_ids))
    lent = outlet.lend(block_ids)
    assert max(len(frame) for frame in lent.frames) <= 4
    assert (np.concatenate(list(lent.frames)) == blocks[block_ids]).all()
    lent.give_back()


def test_frames_of_host_memory_are_the_pool_itself_where_blocks_lie_together(blocks: Blocks) -> None:
    lent = HostPool(blocks).outlet(4).lend([2, 3, 4])
    assert lent.is_pool
    assert all(np.shares_memory(frame, blocks) for frame in lent.frames)


def test_frames_of_a_device_are_copies(blocks: Blocks, late: DevicePool) -> None:
    outlet = late.outlet(4)
    true = blocks.copy()
    lent = outlet.lend([2, 3])
    assert not lent.is_pool
    blocks[2:4] = 0
    assert (lent.frames[0] == true[2:4]).all()


def test_an_outlet_of_a_device_is_bounded_and_never_lends_a_slot_twice(blocks: Blocks, late: DevicePool) -> None:
    outlet = late.outlet(2)
    lent: list[Lent] = []
    while outlet.has_room(2):
        lent.append(outlet.lend([len(lent), len(lent) + 1]))
    assert len(lent) == 16
    for first, each in enumerate(lent):
        assert (each.frames[0] == blocks[first : first + 2]).all()
    lent[5].give_back()
    lent[5].give_back()
    assert outlet.has_room(2)
    assert not outlet.has_room(3), "a slot that was released twice is free once"


def test_the_thread_that_enters_a_pool_enters_its_device(stream: LateStream, late: DevicePool, blocks: Blocks) -> None:
    thread = threading.Thread(target=late.enter)
    thread.start()
    thread.join()
    assert stream.threads == [thread.ident]
    HostPool(blocks).enter()


def test_a_request_larger_than_the_ring_waits_for_the_whole_ring(blocks: Blocks, late: DevicePool) -> None:
    outlet = late.outlet(1)
    one = outlet.lend([0])
    assert not outlet.has_room(_NUM_BLOCKS)
    one.give_back()
    assert outlet.has_room(_NUM_BLOCKS)
    lent = outlet.lend(range(_NUM_BLOCKS))
    assert (np.concatenate(list(lent.frames)) == blocks).all()
    lent.give_back()
    assert outlet.has_room(16)


def test_a_slot_whose_blocks_could_not_be_read_is_free_again(late: DevicePool, monkeypatch: pytest.MonkeyPatch) -> None:
    outlet = late.outlet(4)

    def fail(block_ids: object, into: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(late, "read", fail)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            outlet.lend([1, 2])


def test_checksums_of_a_device_are_not_waited_for(blocks: Blocks, stream: LateStream, late: DevicePool) -> None:
    computer = late.checksums(DOT64)
    pending = [computer.begin([first, first + 1]) for first in range(0, 20, 2)]
    assert [each.take() for each in pending] == [None] * 10
    assert stream.num_waits == 0
    expected = HostPool(blocks).checksums(DOT64)
    for first, each in enumerate(pending):
        while (found := each.take()) is None:
            pass
        assert found == expected.begin([2 * first, 2 * first + 1]).take()
    assert stream.num_waits == 0


def test_checksums_are_of_the_blocks_as_they_were_written_before(blocks: Blocks, late: DevicePool) -> None:
    payload = random_payload(2)
    late.write([4, 5], payload)
    pending = late.checksums(DOT64).begin([4, 5])
    while (found := pending.take()) is None:
        pass
    assert found == HostPool(payload).checksums(DOT64).begin([0, 1]).take()


def test_the_checksum_kind_none_gives_zeros(pool: KvPool) -> None:
    assert pool.checksums(NONE).begin([1, 2]).take() == [0, 0]
    parts = pool.checksums(NONE).begin_parts([1, 2, 3])
    parts.add(0, 3)
    assert parts.finish().take() == [0, 0, 0]


def test_a_kind_that_cannot_be_computed_there_is_an_error(blocks: Blocks, late: DevicePool) -> None:
    with pytest.raises(ValueError, match="'xxh3' for device memory"):
        late.checksums(XXH3)
    with pytest.raises(ValueError, match="'crc' for host memory"):
        HostPool(blocks).checksums("crc")


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros((8, 8), dtype=torch.int8),
        torch.zeros((8, 8), dtype=torch.uint8).T[1:],
        torch.zeros((2, 2, 2), dtype=torch.uint8),
    ],
)
def test_a_pool_is_rows_of_bytes(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a pool is a contiguous uint8 tensor"):
        DevicePool(memory)


def test_the_memory_says_what_kind_of_pool_it_is(blocks: Blocks) -> None:
    for pool, is_device in ((open_pool(blocks), False), (open_pool(torch.from_numpy(blocks)), True)):
        assert (pool.is_device, pool.num_blocks, pool.block_bytes) == (is_device, _NUM_BLOCKS, _BLOCK_BYTES)


@pytest.mark.parametrize(("block_bytes", "num_slots"), [(2**18, [4, 1]), (2**20, [1] * 5), (2**20 + 4, [1] * 5)])
def test_blocks_go_to_a_device_a_megabyte_at_a_time(
    block_bytes: int, num_slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("baton.kvtransfer.pools.device._SLOT_BYTES", 2**20)
    pool = late_pool(np.zeros((8, block_bytes), dtype=np.uint8))
    monkeypatch.setattr(pool, "_write_from", lambda memory, part: sizes.append(len(part)))
    pool.write(range(5), np.zeros((5, block_bytes), dtype=np.uint8))
    assert sizes == num_slots
    pool.settle()
