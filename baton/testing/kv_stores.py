"""What every `KvStore` must do. A store's own tests derive from `KvStoreSuite` and say how it is opened.

Nothing here waits for longer than a store needs: a landing is waited for with a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from baton.engine.cache.store import KvStore, StoredBlock, checksum_of

BLOCK_BYTES = 4096
_DEADLINE_S = 10.0


def hash_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def block_of(number: int) -> StoredBlock:
    """A block that is like no other."""
    content = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    return StoredBlock(hash_of(number), checksum_of(hash_of(number), content), content)


class Collected:
    """A landing that keeps copies of what comes, at most `most` blocks. See `Landing`."""

    def __init__(self, most: int = 2**30) -> None:
        self.blocks: list[StoredBlock] = []
        self.num_after_the_end = 0
        self._most = most
        self._ended = threading.Event()

    def arrived(self, block: StoredBlock) -> bool:
        self.num_after_the_end += self._ended.is_set()
        self.blocks.append(block._replace(content=block.content.copy()))
        return len(self.blocks) < self._most

    def ended(self) -> None:
        self._ended.set()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> list[StoredBlock]:
        """What has come when the load has ended."""
        assert self._ended.wait(_DEADLINE_S), "a load has no end"
        return self.blocks


class KvStoreSuite:
    """Derive from it, and open a store for at least 16 blocks of `BLOCK_BYTES`."""

    def open(self) -> KvStore:
        raise NotImplementedError

    @contextmanager
    def opened(self, *numbers: int) -> Iterator[KvStore]:
        """A store that was given these blocks."""
        store = self.open()
        try:
            for number in numbers:
                store.put(block_of(number))
            yield store
        finally:
            store.close()

    def loaded(self, store: KvStore, numbers: Sequence[int], most: int = 2**30) -> list[StoredBlock]:
        landing = Collected(most)
        store.load([hash_of(number) for number in numbers], landing)
        found = landing.wait()
        assert landing.num_after_the_end == 0
        return found

    def test_what_was_put_is_loaded_as_it_was(self) -> None:
        with self.opened(1, 2, 3) as store:
            assert store.lookup([hash_of(1), hash_of(2), hash_of(3)]) == 3
            found = self.loaded(store, [1, 2, 3])
            assert [each.block_hash for each in found] == [hash_of(1), hash_of(2), hash_of(3)]
            for each, number in zip(found, (1, 2, 3), strict=True):
                assert each.checksum == block_of(number).checksum == checksum_of(each.block_hash, each.content)
                assert each.content.tobytes() == block_of(number).content.tobytes()

    def test_blocks_count_up_to_the_first_that_is_missing(self) -> None:
        with self.opened(1, 2, 4) as store:
            for numbers, num_there in (((1, 2, 3, 4), 2), ((3, 1), 0), ((), 0)):
                hashes = [hash_of(number) for number in numbers]
                assert num_there <= store.lookup(hashes) <= len(hashes)
                self.loaded(store, numbers)  # whoever could not know knows it then
                assert store.lookup(hashes) == num_there

    def test_a_block_is_held_from_its_put_on(self) -> None:
        with self.opened(1, 2) as store:
            store.forget(hash_of(2))
            assert [store.holds(hash_of(number)) for number in (1, 2, 3)] == [True, False, False]

    def test_a_load_of_what_is_missing_ends(self) -> None:
        with self.opened(1) as store:
            assert [each.block_hash for each in self.loaded(store, [1, 2])] == [hash_of(1)]
            assert self.loaded(store, [9]) == []

    def test_a_block_is_read_when_it_is_put(self) -> None:
        with self.opened() as store:
            block = block_of(1)
            store.put(block)
            block.content[:] = 0
            (found,) = self.loaded(store, [1])
            assert found.content.tobytes() == block_of(1).content.tobytes()

    def test_a_landing_that_wants_no_more_gets_no_more(self) -> None:
        with self.opened(1, 2, 3) as store:
            assert len(self.loaded(store, [1, 2, 3], most=1)) == 1

    def test_what_is_forgotten_is_not_there_and_may_come_again(self) -> None:
        with self.opened(1, 2) as store:
            store.forget(hash_of(1))
            store.forget(hash_of(7))
            assert store.lookup([hash_of(1)]) == 0
            assert store.lookup([hash_of(2)]) == 1
            store.put(block_of(1))
            assert len(self.loaded(store, [1, 2])) == 2

    def test_a_block_that_is_put_twice_is_there_once(self) -> None:
        with self.opened(1, 1) as store:
            usage = store.usage
            store.put(block_of(1))
            assert store.usage == usage
            assert len(self.loaded(store, [1])) == 1

    def test_usage_is_a_share(self) -> None:
        with self.opened(*range(100)) as store:
            assert 0.0 <= store.usage <= 1.0

    def test_it_is_used_from_several_threads_at_once(self) -> None:
        with self.opened(*range(8)) as store:
            landings = [Collected() for _ in range(8)]

            def work(number: int) -> None:
                store.load([hash_of(each) for each in range(8)], landings[number])
                for other in range(20, 24):
                    store.put(block_of(other))
                    store.lookup([hash_of(other)])

            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_DEADLINE_S)
            for landing in landings:
                for each in landing.wait():
                    assert each.checksum == checksum_of(each.block_hash, each.content)

    def test_closing_ends_loads(self) -> None:
        landings = [Collected() for _ in range(20)]
        with self.opened(1, 2) as store:
            for landing in landings:
                store.load([hash_of(1), hash_of(2)], landing)
        for landing in landings:
            landing.wait()
