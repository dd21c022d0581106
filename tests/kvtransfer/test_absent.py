from __future__ import annotations

import pytest

from baton.kvtransfer import absent
from baton.kvtransfer.absent import EarlyGrant, EarlyGrants, End, EndedHandoffs
from baton.kvtransfer.messages import Grant, HandoffName, PeerHello
from baton.kvtransfer.sender_connections import Peer
from tests.kvtransfer.loopback import LoopbackNetwork, LoopbackReceiver, LoopbackSender
from tests.kvtransfer.pair import empty_blocks, receiving_facts
from tests.kvtransfer.pools import digest_of, key_of


def early(number: int, deadline_s: float = 10.0, receiver_epoch: int = 1) -> EarlyGrant:
    facts, key = receiving_facts(), key_of(number)
    network, blocks = LoopbackNetwork(), empty_blocks()
    endpoint = LoopbackReceiver(network, "D", blocks, peers_write=True).endpoint
    hello = PeerHello(
        "D", receiver_epoch, 2, "model-a", facts.layout, facts.num_blocks, facts.checksum, facts.process, (endpoint,)
    )
    peer = Peer(b"connection", hello, LoopbackSender(network, endpoint, blocks))
    grant = Grant(HandoffName(*key), receiver_epoch, 2, 4, 0, digest_of(key), (0,), (1,))
    return EarlyGrant(peer, grant, deadline_s)


def test_an_early_grant_is_taken_once() -> None:
    grants, grant = EarlyGrants(), early(1)
    assert grants.put(grant)
    assert grants.take(key_of(1)) is grant
    assert grants.take(key_of(1)) is None


def test_early_grants_are_found_from_their_deadline_on() -> None:
    grants, first, second = EarlyGrants(), early(1, 5.0), early(2, 7.0)
    assert grants.put(first)
    assert grants.put(second)
    assert grants.take_overdue(4.9) == []
    assert grants.take_overdue(5.0) == [first]
    assert grants.take_overdue(9.0) == [second]


def test_early_grants_are_void_with_the_connection_of_their_receiver() -> None:
    grants, mine, other = EarlyGrants(), early(1, receiver_epoch=1), early(2, receiver_epoch=7)
    assert grants.put(mine)
    assert grants.put(other)
    assert grants.take_of(receiver_epoch=1) == [mine]
    assert grants.take(key_of(1)) is None
    assert grants.take(key_of(2)) is other


def test_early_grants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "_MAX_EARLY", 2)
    grants = EarlyGrants()
    assert [grants.put(early(number)) for number in range(3)] == [True, True, False]


def test_the_first_record_of_an_end_is_not_overwritten() -> None:
    ended, name = EndedHandoffs(), HandoffName(*key_of(1))
    ended.remember(key_of(1), End(needs_fence=True))
    ended.remember(key_of(1))
    assert ended.revoked(name, "once more").needs_fence


def test_as_many_ends_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "_MAX_ENDED", 2)
    ended = EndedHandoffs()
    for number in range(3):
        ended.remember(key_of(number))
    assert [key_of(number) in ended for number in range(3)] == [False, True, True]
