"""A prefix of another node lands in the prefix cache, verified, or not at all."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import create_autospec

import pytest

from baton.engine.cache.block_log import BlockLog, PublishedRun
from baton.engine.cache.hashing import block_hashes
from baton.kvtransfer.commands import CancelReceiving, Delivered, Failed, GrantBlocks, Released
from baton.node import borrower as borrowing
from baton.node.borrower import Arrived, PrefixBorrower
from baton.wire.errors import BatonError, InvalidMessage, Overloaded, RequestFailed, TransferFailed
from baton.wire.messages import HandoffFigures, PrefillPeer
from tests.node.sharing import PROMPT, SIZE, cache, make_core, pull, receiving_end
from tests.request_keys import A, B, C

FIGURES = HandoffFigures(3, 300, 20, 10)
HASHES = block_hashes("model", PROMPT, (), SIZE)


def test_what_has_come_is_found_by_the_next_request_and_by_the_routers_hashes() -> None:
    core, (end, thread, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    cache(core, PROMPT.first(4), B)
    borrower.begin(pull(A))
    (grant,) = thread.commands
    assert isinstance(grant, GrantBlocks)
    assert grant.peer == PrefillPeer("S", 6, "tcp://127.0.0.1:9")
    assert (grant.blocks.num_tokens, grant.blocks.num_cached_tokens, len(grant.blocks.block_ids)) == (16, 4, 3)
    assert not grant.blocks.has_firsts
    assert set(core.cached_hashes()) == set(HASHES[:1]), "nothing of it can be found before it is verified"
    notices.put(Delivered(A, (), FIGURES, 7))
    borrower.poll()
    assert borrower.take_arrived() == [Arrived(A, 16, FIGURES)]
    assert set(core.cached_hashes()) == set(HASHES)
    assert (core.status().num_held_blocks, list(borrower.keys), borrower.take_arrived()) == (0, [], [])
    reservation = core.handoffs.reserve(C, PROMPT)
    assert reservation is not None
    assert reservation.num_cached_tokens == 16
    core.check()


def test_readers_of_kv_events_hear_of_what_has_come() -> None:
    core, log = make_core(), create_autospec(BlockLog, instance=True)
    core.log_blocks(log)
    cache(core, PROMPT, A)
    log.published.assert_called_once_with(PublishedRun(PROMPT, 0, None, HASHES, PROMPT.token_ids))


def test_what_fails_is_told_once_and_held_until_nobody_can_write() -> None:
    core, (end, thread, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    borrower.begin(pull(A))
    notices.put(Failed(A, "as the test says"))
    notices.put(Failed(A, "again"))
    borrower.poll()
    ((key, error),) = borrower.take_failures()
    assert (key, str(error), type(error)) == (A, "as the test says", TransferFailed)
    assert thread.commands[1:] == [CancelReceiving(A)]
    assert core.status().num_held_blocks == 4
    notices.put(Released(A))
    borrower.poll()
    assert (core.status().num_held_blocks, core.cached_hashes(), borrower.take_failures()) == (0, [], [])
    assert list(borrower.keys) == []


def test_what_nobody_waits_for_any_more_is_kept_if_it_comes_and_not_told() -> None:
    core, (end, thread, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    borrower.begin(pull(A))
    borrower.cancel(A)
    borrower.cancel(A)
    assert thread.commands[1:] == [CancelReceiving(A)]
    notices.put(Delivered(A, (), FIGURES, 7))
    borrower.poll()
    assert (borrower.take_arrived(), borrower.take_failures()) == ([], [])
    assert set(core.cached_hashes()) == set(HASHES)


def test_the_pulls_of_a_router_that_is_gone_are_cancelled_and_no_others() -> None:
    core, (end, thread, _) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    borrower.begin(pull(A, PROMPT.first(4)))
    borrower.begin(pull(B, PROMPT.first(8)))
    borrower.cancel_all(A.handoff_id)
    assert thread.commands[2:] == [CancelReceiving(A)]
    assert [(key, type(error)) for key, error in borrower.take_failures()] == [(A, RequestFailed)]


def test_without_room_or_place_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core, (end, thread, _) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    borrower.begin(pull(A))
    refusals: list[tuple[type[BatonError], object]] = [(InvalidMessage, pull(A))]
    assert core.handoffs.reserve(C, replace(PROMPT, cache_salt=b"tenant")) is not None
    refusals += [(InvalidMessage, pull(C)), (Overloaded, pull(B))]
    for error, order in refusals:
        with pytest.raises(error):
            borrower.begin(order)  # type: ignore[arg-type]
    assert core.handoffs.release(C)
    monkeypatch.setattr(borrowing, "MAX_PULLS", 1)
    with pytest.raises(Overloaded):
        borrower.begin(pull(B))
    assert len(thread.commands) == 1
