from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from baton.kvtransfer import sender_connections
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.messages import (
    RECEIVER_TO_SENDER,
    SENDER_TO_RECEIVER,
    Endpoint,
    Grant,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    Renew,
)
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.registry import AUTO, ZMQ, PoolMemory, SenderFactory, TransportSettings
from baton.wire import codec
from baton.wire.errors import Refused
from baton.wire.layout import KvLayout, LayerKv
from tests.kvtransfer.loopback import LoopbackReceiver
from tests.kvtransfer.pair import (
    MAILBOX,
    NUM_BLOCKS,
    SENDER_EPOCH,
    SETTINGS,
    SHM,
    Pair,
    empty_blocks,
    open_pair,
    receiving_facts,
    sending_facts,
)
from tests.kvtransfer.pools import LAYOUT, LEASE_S, key_of

KEY = key_of(1)


def refusal(receiver: ReceivingFacts) -> str:
    """The reason for which a handoff to this receiver fails."""
    with open_pair(MAILBOX, receiver=receiver) as pair:
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.until(lambda: bool(pair.decode.pool.failures))
        assert pair.decode.pool.pool.num_held == 0
        assert not pair.decode.side.handoffs
        (reason,) = pair.decode.pool.failures_of(KEY)
        return reason


def test_another_model_is_refused_naming_both() -> None:
    reason = refusal(replace(receiving_facts(), fingerprint="model-b"))
    assert "model-a here, model-b at D" in reason


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (replace(LAYOUT, block_size=16), "block_size is 4 here and 16 at D"),
        (replace(LAYOUT, dtype="fp8_e4m3"), "dtype is float32 here and fp8_e4m3 at D"),
        (KvLayout.of_layers("float32", 4, [LayerKv(3, 4)]), "num_kv_heads of layer 0 is 1 here and 3 at D"),
    ],
)
def test_another_layout_is_refused_naming_both(other: KvLayout, fact: str) -> None:
    assert fact in refusal(replace(receiving_facts(), layout=other))


def test_another_kind_of_checksum_is_refused_naming_both() -> None:
    said = refusal(replace(receiving_facts(), checksum="none"))
    assert "KV checksum is xxh3 here and none at D" in said
    assert "--kv-checksum" in said


def test_another_protocol_version_is_refused_naming_both(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SENDER_TO_RECEIVER.encode(PeerWelcome("P", SENDER_EPOCH, MAILBOX, (sending_facts().process,)))
    ours, newer = codec.PROTOCOL_VERSION, codec.PROTOCOL_VERSION + 1
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", newer)
    with pytest.raises(Refused, match=f"protocol version {ours} does not match ours, {newer}"):
        SENDER_TO_RECEIVER.decode(theirs)


def test_a_peer_of_another_version_fails_only_its_own_handoffs() -> None:
    with open_pair(MAILBOX) as pair:
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.until(lambda: is_welcome(pair))
        newer = bytearray(SENDER_TO_RECEIVER.encode(PeerWelcome("P", 1, "x", (sending_facts().process,))))
        newer[2] += 1
        pair.prefill.say_bytes(bytes(newer))
        pair.until(lambda: bool(pair.decode.pool.failures))
        ours = codec.PROTOCOL_VERSION
        assert pair.decode.pool.failures_of(KEY) == [f"protocol version {ours + 1} does not match ours, {ours}"]
        assert pair.decode.side.counters.num_rejected_messages == 1


def is_welcome(pair: Pair) -> bool:
    return any(connection.welcome is not None for connection in pair.decode.side.connections)


@pytest.mark.parametrize("frames", [[b""], [b"junk"], [b"a", b"b"]], ids=str)
def test_junk_ends_only_its_own_connection(frames: list[bytes]) -> None:
    with open_pair(MAILBOX) as pair:
        stranger = pair.context.socket(zmq.DEALER)
        stranger.connect(pair.prefill.address)
        stranger.send_frames(frames)
        pair.prefill.prefill(KEY, 8)
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.until(lambda: KEY in pair.decode.pool.delivered_kv)
        pair.until(lambda: pair.prefill.side.counters.num_rejected_messages == 1)
        assert isinstance(SENDER_TO_RECEIVER.decode(stranger.recv(0)), PeerRefusal)


def test_a_handshake_without_an_answer_is_repeated() -> None:
    with open_pair(MAILBOX) as pair:
        pair.prefill.link.lose(PeerHello, PeerWelcome)
        pair.prefill.link.is_lost = lambda message: True
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.pass_time(12)
        assert "no answer from prefill node P" in pair.decode.pool.failures_of(KEY)[0]
        assert not pair.decode.side.handoffs
        pair.prefill.link.lose()
        again = key_of(2)
        pair.prefill.prefill(again, 8)
        pair.decode.grant(again, 8, pair.prefill.peer)
        pair.until(lambda: again in pair.decode.pool.delivered_kv)


def test_a_hello_waits_for_a_transport_that_starts_and_fails_nothing() -> None:
    with open_pair(MAILBOX) as pair:
        pair.prefill.set_starting(True)
        pair.prefill.prefill(KEY, 8)
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.pass_time(5)  # longer than it takes until the decode node renews
        assert pair.prefill.link.num_seen(Renew)
        assert not is_welcome(pair)
        pair.prefill.set_starting(False)
        pair.until(lambda: KEY in pair.decode.pool.delivered_kv)
        assert pair.decode.pool.failures == []
        assert pair.prefill.side.counters.num_rejected_messages == 0


def test_a_hello_waits_for_one_lease_and_no_longer() -> None:
    with open_pair(MAILBOX) as pair:
        pair.prefill.set_starting(True)
        pair.prefill.prefill(KEY, 8)
        pair.decode.wait_for_room(KEY, pair.prefill.peer)
        pair.pass_time(LEASE_S + 1)
        assert pair.decode.pool.failures_of(KEY) == ["refused by P: the network is starting"]
        assert pair.is_quiet


def test_more_hellos_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_connections, "_MAX_WAITING", 0)
    with open_pair(MAILBOX) as pair:
        pair.prefill.set_starting(True)
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.settle()
        assert pair.decode.pool.failures_of(KEY) == ["refused by P: the network is starting"]


def test_a_connection_that_broke_is_greeted_again_and_costs_no_later_handoff() -> None:
    with open_pair(MAILBOX) as pair:
        for number in range(1, 4):
            key = key_of(number)
            pair.prefill.prefill(key, 8)
            pair.decode.grant(key, 8, pair.prefill.peer)
            pair.until(lambda: key_of(number) in pair.decode.pool.delivered_kv)  # noqa: B023
            pair.context.wire.break_connections()
        assert pair.decode.pool.failures == []
        assert pair.prefill.side.counters.num_rejected_messages == 0


def test_a_grant_that_was_lost_with_its_connection_fails_at_once() -> None:
    with open_pair(MAILBOX) as pair:
        pair.prefill.prefill(KEY, 8)
        pair.prefill.link.lose(Grant)
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.settle()
        pair.prefill.link.lose()
        pair.context.wire.break_connections()
        pair.settle()
        assert pair.decode.pool.failures_of(KEY) == ["the connection to prefill node P broke"]


def test_no_message_is_sent_before_hello_and_hello_waits_until_every_receiver_is_ready() -> None:
    with open_pair(MAILBOX) as pair:
        receiver = pair.decode.receivers[0]
        assert isinstance(receiver, LoopbackReceiver)
        receiver.is_ready = False
        pair.decode.wait_for_room(key_of(2), pair.prefill.peer)
        pair.decode.grant(KEY, 8, pair.prefill.peer)
        pair.decode.cancel(KEY)
        pair.pass_time(9)
        assert pair.prefill.link.seen == []
        receiver.is_ready = True
        receiver.move_to("another endpoint")
        again = key_of(3)
        pair.decode.grant(again, 8, pair.prefill.peer)
        pair.prefill.prefill(again, 8)
        pair.until(lambda: again in pair.decode.pool.delivered_kv)
        assert isinstance(pair.prefill.link.seen[0], PeerHello)
        assert pair.decode.pool.failures == []


# --- choosing a transport --------------------------------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def hello(*endpoints: Endpoint, host: str | None = None) -> PeerHello:
    facts = receiving_facts()
    process = facts.process if host is None else replace(facts.process, host=host)
    return PeerHello("D", 1, SENDER_EPOCH, "model-a", LAYOUT, NUM_BLOCKS, "xxh3", process, endpoints)


def factory(context: zmq.Context[zmq.Socket[bytes]], choice: str) -> SenderFactory:
    settings = TransportSettings(choice, context, "127.0.0.1", SETTINGS, sending_facts().process)
    return SenderFactory(settings, PoolMemory(settings, "sender"), HostPool(empty_blocks()))


_NO_SEGMENT = Endpoint(SHM, f"baton-{'0' * 32}")
_TCP = Endpoint(ZMQ, "tcp://127.0.0.1:9")


def test_falls_back_to_the_next_endpoint_that_works(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    name, sender = factory(context, AUTO).open(hello(_NO_SEGMENT, _TCP))
    sender.close()
    assert name == ZMQ


def test_shared_memory_of_another_host_is_not_tried(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(Refused, match="do not share memory"):
        factory(context, SHM).open(hello(_NO_SEGMENT, host="elsewhere"))


@pytest.mark.parametrize(
    ("choice", "endpoints", "reason"),
    [
        (ZMQ, [_NO_SEGMENT], "shm: this node takes zmq"),
        (AUTO, [Endpoint("nixl", "x")], "nixl: this node takes shm or shm_slots or zmq"),
        (AUTO, [], "none offered"),
        (AUTO, [Endpoint("pigeon", "x")], "pigeon: this node takes shm or shm_slots or zmq"),
        (AUTO, [Endpoint(ZMQ, "tcp://a b:5")], "cannot be dialled"),
        (AUTO, [Endpoint(SHM, str(Path("/etc/passwd")))], "not a segment"),
    ],
)
def test_the_refusal_says_why_there_is_no_common_transport(
    context: zmq.Context[zmq.Socket[bytes]], choice: str, endpoints: list[Endpoint], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        factory(context, choice).open(hello(*endpoints))


def test_a_peer_that_floods_leaves_time_for_the_rest_of_a_round() -> None:
    """Of either side: messages that are right and come faster than they are read."""
    with open_pair(MAILBOX) as pair:
        pair.decode.grant(KEY, 4, pair.prefill.peer)
        pair.settle()
        (dealer,) = [dealer for dealer in pair.context.dealers if not dealer.closed]
        flood = [RECEIVER_TO_SENDER.encode(Renew(())), SENDER_TO_RECEIVER.encode(Renew(()))]
        inboxes = [pair.prefill.router.inbox, dealer.inbox]
        for inbox, frame, identity in zip(inboxes, flood, (dealer.identity, b""), strict=True):
            inbox.extend((pair.now_s, number, identity, (frame,)) for number in range(1000, 3000))
        pair.poll()
        assert all(1000 < len(inbox) < 2000 for inbox in inboxes)
