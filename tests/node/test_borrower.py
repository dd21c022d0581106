"""A prefix of another node lands in the prefix cache, verified, or not at all."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import create_autospec

import pytest

from baton.engine.cache.block_log import BlockLog, PublishedRun
from baton.engine.cache.hashing import block_hashes
from baton.engine.core import EngineCore
from baton.kvtransfer.commands import (
    CancelReceiving,
    Delivered,
    Failed,
    GrantBlocks,
    ReceivingNotice,
    Released,
    Verified,
)
from baton.node import borrower as borrowing
from baton.node.borrower import Arrived, PrefixBorrower
from baton.wire.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidMessage,
    Overloaded,
    RequestFailed,
    TransferFailed,
)
from baton.wire.messages.legs import PrefillPeer
from baton.wire.messages.output import HandoffFigures
from baton.wire.messages.prefixes import AwaitedPrefix
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.node.sharing import PROMPT, SIZE, Notices, cache, make_core, pull, receiving_end
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
    borrower.poll(0.0)
    assert borrower.take_arrived() == [Arrived(A, 16, FIGURES)]
    assert set(core.cached_hashes()) == set(HASHES)
    assert (core.status().num_held_blocks, list(borrower.keys), borrower.take_arrived()) == (0, [], [])
    reservation = core.handoffs.reserve(C, PROMPT)
    assert reservation is not None
    assert reservation.num_cached_tokens == 16
    core.check()


def test_readers_of_kv_events_hear_of_what_has_come() -> None:
    core, log, (end, _, notices) = make_core(), create_autospec(BlockLog, instance=True), receiving_end()
    core.log_blocks(log)
    borrower = PrefixBorrower(core, end)
    cache(core, PROMPT.first(4), B)
    borrower.begin(pull(A))
    for notice in (Verified(A, 2), Delivered(A, (), FIGURES, 7)):
        notices.put(notice)
        borrower.poll(0.0)
    runs = [call.args[0] for call in log.published.call_args_list]
    assert runs == [
        PublishedRun(PROMPT.first(4), 0, None, HASHES[:1], PROMPT.token_ids[:4]),
        PublishedRun(PROMPT, 1, HASHES[0], HASHES[1:3], PROMPT.token_ids[4:12]),
        PublishedRun(PROMPT, 3, HASHES[2], HASHES[3:], PROMPT.token_ids[12:]),
    ]


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_what_came_before_the_end_stays_and_is_found(ends: str) -> None:
    core, (end, _, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    cache(core, PROMPT.first(4), B)
    borrower.begin(pull(A))
    notices.put(Verified(A, 2))
    borrower.poll(0.0)
    assert (set(core.cached_hashes()), core.status().num_held_blocks) == (set(HASHES[:3]), 4)
    if ends == "cancelled":
        borrower.cancel(A)
    else:
        notices.put(Failed(A, "as the test says"))
    notices.put(Released(A))
    borrower.poll(0.0)
    assert (set(core.cached_hashes()), core.status().num_held_blocks) == (set(HASHES[:3]), 0)
    reservation = core.handoffs.reserve(C, PROMPT)
    assert reservation is not None
    assert reservation.num_cached_tokens == 12
    core.check()


AWAITED = AwaitedPrefix(2, patience_s=1.0, token_s=0.5)
PULLED = RequestKey(A.handoff_id, 2)


def waiting() -> tuple[EngineCore, PrefixBorrower, Notices]:
    """A request that waits from second 10 on for a prefix, which is borrowed."""
    core, (end, _, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    core.add(A, Prompt(tuple(range(20))), DecodingParams(max_tokens=1))
    borrower.hold_back(A, AWAITED, 10.0)
    borrower.begin(pull(PULLED))
    assert core.awaits_readiness
    return core, borrower, notices


@pytest.mark.parametrize("notice", [Delivered(PULLED, (), FIGURES, 7), Failed(PULLED, "as the test says")])
def test_a_request_waits_until_its_prefix_is_here_or_will_not_come(notice: ReceivingNotice) -> None:
    core, borrower, notices = waiting()
    borrower.poll(10.9)
    assert core.awaits_readiness
    notices.put(notice)
    borrower.poll(10.9)
    assert not core.awaits_readiness


def test_a_request_waits_as_long_again_as_what_has_come_was_worth() -> None:
    core, borrower, notices = waiting()
    notices.put(Verified(PULLED, 2))
    borrower.poll(10.5)
    borrower.poll(10.0 + 1.0 + 8 * 0.5 - 0.1)
    assert core.awaits_readiness
    assert borrower.take_failures() == []
    borrower.poll(10.0 + 1.0 + 8 * 0.5)
    assert not core.awaits_readiness
    ((key, error),) = borrower.take_failures()
    assert (key, type(error)) == (PULLED, DeadlineExceeded)


def test_a_prefix_that_is_not_even_begun_is_not_waited_for_any_longer() -> None:
    core, (end, thread, _) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    core.add(A, PROMPT, DecodingParams(max_tokens=1))
    borrower.hold_back(A, AWAITED, 10.0)
    borrower.poll(11.0)
    assert [key for key, _ in borrower.take_failures()] == [PULLED]
    assert (core.awaits_readiness, thread.commands) == (False, [])


@pytest.mark.parametrize("how", ["cancel", "cancel_all", "refused"])
def test_a_wait_ends_with_its_pull(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, (end, _, _) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    core.add(A, PROMPT, DecodingParams(max_tokens=1))
    borrower.hold_back(A, AWAITED, 10.0)
    if how == "cancel":
        borrower.cancel(PULLED)
    elif how == "cancel_all":
        borrower.cancel_all(A.handoff_id)
        assert [key for key, _ in borrower.take_failures()] == [PULLED]
    else:
        monkeypatch.setattr(borrowing, "MAX_PULLS", 0)
        with pytest.raises(Overloaded):
            borrower.begin(pull(PULLED))
    assert not core.awaits_readiness
    borrower.poll(100.0)
    assert borrower.take_failures() == []


def test_what_fails_is_told_once_and_held_until_nobody_can_write() -> None:
    core, (end, thread, notices) = make_core(), receiving_end()
    borrower = PrefixBorrower(core, end)
    borrower.begin(pull(A))
    notices.put(Failed(A, "as the test says"))
    notices.put(Failed(A, "again"))
    borrower.poll(0.0)
    ((key, error),) = borrower.take_failures()
    assert (key, str(error), type(error)) == (A, "as the test says", TransferFailed)
    assert thread.commands[1:] == [CancelReceiving(A)]
    assert core.status().num_held_blocks == 4
    notices.put(Released(A))
    borrower.poll(0.0)
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
    borrower.poll(0.0)
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
