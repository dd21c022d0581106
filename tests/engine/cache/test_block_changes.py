"""What came into a tier and left it: what is told of is what became of it, and no more than that."""

from __future__ import annotations

from baton.engine.cache.block_changes import BlockChanges
from baton.testing.kv_stores import hash_of

ONE, TWO, THREE = (hash_of(number) for number in (1, 2, 3))


def test_what_has_changed_is_taken_once_the_oldest_first() -> None:
    changes = BlockChanges()
    changes.came([ONE, TWO])
    changes.left([THREE])
    assert changes.take(2) == [(ONE, True), (TWO, True)]
    assert changes.take(2) == [(THREE, False)]
    assert changes.take(2) == []


def test_a_block_that_comes_and_leaves_meanwhile_has_not_changed() -> None:
    changes = BlockChanges()
    for _ in range(1000):
        changes.came([ONE])
        changes.left([ONE])
        changes.left([TWO])
        changes.came([TWO])
    assert changes.take(2) == []
