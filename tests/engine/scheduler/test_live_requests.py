"""Who runs and who waits, in which order, and whose forks are whose."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from baton.engine.cache.block_pool import pack_blocks
from baton.engine.scheduler.live_requests import LiveRequests
from baton.engine.scheduler.request import Fork, Request
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import A, B, C, key_of

PARAMS = DecodingParams(max_tokens=8, ignore_eos=True)
FIRST, SECOND = key_of("first fork"), key_of("second fork")


def request(key: RequestKey, *, turn_s: float = 0.0, holds: int = 0, forks: tuple[RequestKey, ...] = ()) -> Request:
    """A prompt of three tokens, that may hold blocks already."""
    return Request(
        key,
        Prompt((1, 2, 3)),
        PARAMS,
        b"",
        64,
        block_table=pack_blocks(range(holds)),
        forks=tuple(Fork(fork, PARAMS) for fork in forks),
        turn_s=turn_s,
    )


def admitted(*requests: Request) -> LiveRequests:
    live = LiveRequests()
    for each in requests:
        live.add(each)
        live.admit(each)
    return live


def waiting(live: LiveRequests) -> list[RequestKey]:
    return [each.key for each in live.waiting]


def test_a_request_that_is_held_back_keeps_its_turn_and_holds_nobody_up() -> None:
    live, prefix, first = LiveRequests(), SimpleNamespace(is_over=False), request(A)
    for each in (first, request(B)):
        live.add(each)
    first.awaited = prefix
    for found in (live.first_waiting, live.first_without_blocks):
        assert found is not None
        assert found.key == B
    assert live.awaits_readiness
    prefix.is_over = True
    live.add(request(C))
    assert live.first_waiting is not None
    assert (live.first_waiting.key, live.awaits_readiness) == (A, False)


def test_a_running_request_has_a_row_and_each_of_its_forks_one() -> None:
    live = admitted(leader := request(A, forks=(FIRST, SECOND)), request(B))
    assert (live.num_running, live.num_rows, live.num_waiting) == (2, 4, 0)
    live.preempt(leader)
    assert (live.num_running, live.num_rows, live.num_waiting) == (1, 1, 1)
    live.admit(leader)
    assert live.num_rows == 4
    assert live.remove_fork(FIRST) is leader
    assert live.num_rows == 3
    assert live.take_forks(leader) == (Fork(SECOND, PARAMS),)
    assert (live.num_rows, leader.forks) == (2, ())


def test_the_rows_of_a_request_that_leaves_leave_with_it() -> None:
    live = admitted(request(A, forks=(FIRST, SECOND)))
    assert live.remove(A) is not None
    assert (live.num_rows, live.is_empty, FIRST in live) == (0, True, False)
    live.add(request(B, forks=(FIRST,)))
    assert live.remove(B) is not None
    assert (live.num_rows, live.is_empty, FIRST in live) == (0, True, False)
    assert live.remove(B) is None


def test_a_fork_is_there_until_it_is_removed_by_its_own_key() -> None:
    live = LiveRequests()
    live.add(leader := request(A, forks=(FIRST, SECOND)))
    assert (FIRST in live, SECOND in live, A in live, B in live) == (True, True, True, False)
    assert live.wanted_keys() == [A, FIRST, SECOND]
    leader.is_wanted = False
    assert (live.remove_fork(FIRST), live.remove_fork(A)) == (leader, None)
    assert (FIRST in live, SECOND in live) == (False, True)
    assert live.wanted_keys() == [SECOND]
    assert (live.num_rows, [fork.key for fork in leader.forks]) == (0, [SECOND])


def test_a_request_is_found_by_its_key_whether_it_runs_or_waits() -> None:
    live = admitted(running := request(A))
    live.add(waits := request(B))
    assert (live.get(A), live.get(B), live.get(C)) == (running, waits, None)
    assert list(live) == [running, waits]
    assert not live.is_empty


def test_those_that_came_with_their_kv_go_before_the_preempted_and_these_before_all_others() -> None:
    live = admitted(lost := request(A))
    live.add(request(key_of(1), turn_s=5.0))
    live.preempt(lost)
    live.add(request(B, holds=2, turn_s=9.0))
    live.add(request(C, holds=1, turn_s=1.0))
    assert waiting(live) == [B, C, A, key_of(1)]
    assert live.waiting_holders() == [live.get(B), live.get(C)]


def test_others_wait_by_their_turns_and_as_they_came_where_these_are_the_same() -> None:
    live = LiveRequests()
    for number, turn_s in enumerate((5.0, 3.0, 5.0, 4.0)):
        live.add(request(key_of(number), turn_s=turn_s))
    live.add(request(A, holds=1, turn_s=8.0))
    live.add(request(B, turn_s=1.0))
    assert waiting(live) == [A, B, key_of(1), key_of(3), key_of(0), key_of(2)]
    assert live.first_waiting is live.get(A)


def test_the_owner_of_a_share_is_the_request_that_had_the_key_then() -> None:
    live = admitted(first := request(A))
    share = first.share(3)
    assert live.owner(share) is first
    live.remove(A)
    assert live.owner(share) is None
    second = request(A)
    live.add(second)
    live.admit(second)
    assert (live.owner(share), second.arrival) == (None, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda live: live.add(request(C)),
        lambda live: live.remove(A),
        lambda live: live.remove(B),
        lambda live: live.admit(live.get(B)),
        lambda live: live.preempt(live.get(A)),
        lambda live: live.remove_fork(FIRST),
        lambda live: live.take_forks(live.get(A)),
    ],
)
def test_each_change_of_who_is_there_can_be_noticed(change: Callable[[LiveRequests], object]) -> None:
    live = admitted(request(A, forks=(FIRST,)))
    live.add(request(B))
    before = live.num_changes
    live.get(A), live.by_age(), live.wanted_keys()
    assert live.num_changes == before
    change(live)
    assert live.num_changes > before


def test_who_decodes_is_told_by_age_and_who_computes_a_prompt_by_turns() -> None:
    requests = [request(key_of(number), turn_s=-number) for number in range(5)]
    live = admitted(*reversed(requests))
    for each in requests[:3]:
        each.num_computed_tokens = 2
    requests[0].num_pending_tokens, requests[0].most_tokens = 1, 3  # its last token is being sampled
    assert live.by_age() == ([requests[2], requests[1]], [requests[4], requests[3]])


def test_each_of_several_stages_gets_its_part_of_those_whose_tokens_are_known() -> None:
    requests = [request(key_of(number)) for number in range(5)]
    live = admitted(*requests)
    for each in requests:
        each.num_computed_tokens = 2
    assert live.by_age(2) == (requests[:3], [])
    requests[0].num_pending_tokens = requests[1].num_pending_tokens = 1
    assert live.by_age(2) == (requests[2:], [])
    assert live.by_age(5) == (requests[2:3], [])
    assert live.by_age(1) == (requests, [])


def test_who_is_given_blocks_while_it_waits_stands_among_the_others_that_hold_some_by_arrival() -> None:
    live = LiveRequests()
    for key in (A, B, C):
        live.add(request(key))
    live.add(request(FIRST, holds=1))
    second = next(each for each in live if each.key == B)
    second.block_table = pack_blocks([7])
    live.hold(second)
    assert waiting(live) == [B, FIRST, A, C]


def test_who_loses_its_blocks_stands_behind_all_that_hold_some() -> None:
    live = admitted(lost := request(A))
    live.add(other := request(B, holds=1))
    live.add(request(C, holds=1))
    live.add(request(FIRST))
    live.preempt(lost)
    assert waiting(live) == [B, C, A, FIRST]
    other.block_table = pack_blocks(())
    live.preempt(other)
    assert waiting(live) == [C, B, A, FIRST]
