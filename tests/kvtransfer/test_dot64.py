from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvtransfer.integrity import AUTO, DOT64, NONE, XXH3, resolve
from baton.kvtransfer.pools import dot64
from baton.kvtransfer.pools.base import Checksums, Pending
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.device_checksums import DeviceDot64
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks
from baton.wire.errors import InvalidSetting

_SIZE = 1024


def checksum(block: bytes | Blocks) -> int:
    array = np.frombuffer(bytes(block), dtype=np.uint8)
    return dot64.Dot64(array.size).checksum(array)


def values(pending: Pending) -> list[int]:
    found = pending.take()
    assert found is not None
    return list(found)


def by_definition(block: bytes) -> int:
    """As the module's docstring says it, number by number."""
    padded = block + bytes(-len(block) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    weights: list[int] = dot64.weights(len(words)).tolist()
    total = sum(word * weight for word, weight in zip(words, weights, strict=True))
    mixed = (total + len(block) * 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ mixed >> shift) * factor % 2**64
    return mixed


@pytest.fixture(scope="module")
def block() -> Blocks:
    return np.random.default_rng(3).integers(0, 256, _SIZE, dtype=np.uint8)


@given(st.binary(min_size=1, max_size=300))
def test_host_memory_follows_the_definition(content: bytes) -> None:
    assert checksum(content) == by_definition(content)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400), st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_host_and_device_compute_the_same(block_bytes: int, num_blocks: int, seed: int, data: st.DataObject) -> None:
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    block_ids = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=8))
    here = HostPool(blocks).checksums(DOT64).begin(block_ids)
    there = DevicePool(torch.from_numpy(blocks)).checksums(DOT64).begin(block_ids)
    assert values(here) == values(there) == [by_definition(blocks[block_id].tobytes()) for block_id in block_ids]


def test_blocks_of_more_than_a_slab_have_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(4).integers(0, 256, (5, 4 * 2**16 + 4), dtype=np.uint8)
    order = [4, 0, 3, 3, 1]
    expected = values(HostPool(blocks).checksums(DOT64).begin(order))
    monkeypatch.setattr(DeviceDot64, "max_blocks", 5)
    for slab_words in (1_000, 2**16 + 1, 3 * 2**16):
        monkeypatch.setattr("baton.kvtransfer.pools.device_checksums._SLAB_WORDS", slab_words)
        assert values(DevicePool(torch.from_numpy(blocks)).checksums(DOT64).begin(order)) == expected


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cuts", [(0, 1024), (0, 256, 512, 1024), tuple(range(0, 1025, 4)), (0, 0, 1024)])
def test_parts_add_up_to_the_whole(cuts: tuple[int, ...], on_device: bool) -> None:
    blocks = np.random.default_rng(5).integers(0, 256, (4, _SIZE), dtype=np.uint8)
    pool = DevicePool(torch.from_numpy(blocks)) if on_device else HostPool(blocks)
    computer: Checksums = pool.checksums(DOT64)
    parts = computer.begin_parts([2, 0])
    for begin, end in itertools.pairwise(cuts):
        parts.add(begin, end)
    assert values(parts.finish()) == values(computer.begin([2, 0]))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("part", [(2, 8), (0, 6), (8, 4), (0, 1028)])
def test_a_part_that_is_not_made_of_words_is_an_error(part: tuple[int, int], on_device: bool) -> None:
    blocks = np.zeros((2, _SIZE), dtype=np.uint8)
    pool = DevicePool(torch.from_numpy(blocks)) if on_device else HostPool(blocks)
    computer: Checksums = pool.checksums(DOT64)
    with pytest.raises(ValueError, match="bytes"):
        computer.begin_parts([0]).add(*part)


def test_every_flipped_bit_is_seen(block: Blocks) -> None:
    true = checksum(block)
    for bit in range(0, 8 * _SIZE, 7):  # every place in a word, and every word
        flipped = block.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert checksum(flipped) != true, bit


@given(st.integers(0, 8 * _SIZE - 1), st.integers(0, 8 * _SIZE - 1))
def test_any_two_flipped_bits_are_seen(one: int, other: int) -> None:
    flipped = np.zeros(_SIZE, dtype=np.uint8)
    flipped[one // 8] ^= 1 << one % 8
    flipped[other // 8] ^= 1 << other % 8
    assert (checksum(flipped) == checksum(bytes(_SIZE))) == (one == other)


def test_the_highest_bits_of_two_words_do_not_cancel(block: Blocks) -> None:
    flipped = block.copy()
    flipped[[3, 7]] ^= 0x80
    assert checksum(flipped) != checksum(block)


@given(st.integers(0, _SIZE // 4 - 1), st.integers(0, _SIZE // 4 - 1), st.integers(0, 31))
def test_words_that_changed_places_are_seen_even_when_one_bit_tells_them_apart(one: int, other: int, bit: int) -> None:
    words = np.full(_SIZE // 4, 77, dtype=np.uint32)
    words[one] ^= np.uint32(1 << bit)
    swapped = words.copy()
    swapped[[one, other]] = words[[other, one]]
    assert (checksum(swapped.view(np.uint8)) == checksum(words.view(np.uint8))) == (one == other)


def test_cut_shifted_and_longer_blocks_are_seen(block: Blocks) -> None:
    cut = block.copy()
    cut[-64:] = 0
    found = {checksum(each) for each in (block, cut, np.roll(block, 4), np.roll(block, 1), block[:-4], block[::-1])}
    assert len(found) == 6
    assert len({checksum(bytes(size)) for size in range(1, 65)}) == 64, "zeros of different lengths"


def test_weights_hold_what_the_guarantees_rest_on() -> None:
    found = dot64.weights(2**18).view(np.uint64)
    assert set((found % np.uint64(4)).tolist()) == {1}
    assert len(np.unique(found % np.uint64(2**33))) == len(found)
    # no pattern among neighbours, above or below
    assert abs(float(np.corrcoef(found[:-1] >> np.uint64(33), found[1:] >> np.uint64(33))[0, 1])) < 0.01
    low = (found % np.uint64(2**33)).astype(np.float64)
    assert abs(float(np.corrcoef(low[:-1], low[1:])[0, 1])) < 0.01


def test_the_values_of_this_version_never_change() -> None:
    # two nodes of different releases compare them
    assert checksum(bytes(range(256))) == 0x16FA8B058F51CACC


def test_auto_is_the_one_that_is_cheap_where_the_pool_is() -> None:
    assert (resolve(AUTO, in_device_memory=False), resolve(AUTO, in_device_memory=True)) == (XXH3, DOT64)
    for kind in (DOT64, NONE):
        assert resolve(kind, in_device_memory=True) == resolve(kind, in_device_memory=False) == kind


def test_xxh3_of_device_memory_is_refused_with_what_to_use() -> None:
    with pytest.raises(InvalidSetting, match=r"--kv-checksum xxh3 .* use dot64 or auto"):
        resolve(XXH3, in_device_memory=True)
