from __future__ import annotations

import contextlib
import struct

import pytest
import zmq

from baton.node.router_link import FIRST_RETRY_S, ROUTER_TIMEOUT_S
from baton.wire import links
from baton.wire.codec import PROTOCOL_VERSION
from baton.wire.errors import Overloaded, Refused
from baton.wire.messages.legs import Cancel
from baton.wire.messages.membership import (
    Hello,
    Introduce,
    Leaving,
    Ping,
    Pong,
    Refusal,
    Resume,
    Welcome,
    control_identity,
    live_key,
)
from baton.wire.messages.output import Failed, TokenEvent, Tokens
from baton.wire.messages.prefixes import CacheEvents
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.request_key import RequestKey
from tests.node.conftest import EPOCH, MARKER, SETTINGS, WAIT_MS, FakeRouter, Node
from tests.wire.turned_bit import turned_once

CANCEL = Cancel(b"h" * 16, 1)


def wait_for(socket: zmq.Socket[bytes]) -> None:
    assert socket.poll(WAIT_MS), "no message came"


def registered(node: Node, router: FakeRouter, session: int = 1) -> None:
    assert isinstance(router.receive(), Hello)
    router.send(Welcome(session))
    assert node.receive() == ([], True)
    assert node.link.is_registered


def ping(router: FakeRouter) -> Ping:
    assert router.session is not None
    return Ping(router.session.number, router.session.sent, router.session.received)


def test_a_node_introduces_itself_under_its_epoch_and_is_welcomed(node: Node, router: FakeRouter) -> None:
    assert not node.link.is_registered
    registered(node, router)
    assert router.identity == control_identity(EPOCH)


def test_a_handshake_in_which_a_bit_was_turned_costs_a_moment(router: FakeRouter) -> None:
    turned = turned_once(int(router.address.rsplit(":", 1)[1]))
    with turned as address, contextlib.closing(Node(router, address)) as node:
        while not router.socket.poll(10):
            node.now_s += 0.01
            node.link.receive(node.now_s)
        assert isinstance(router.receive(), Hello)
        assert node.now_s < ROUTER_TIMEOUT_S


def test_requests_arrive_in_order(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.send(CANCEL, ping(router), Cancel(b"h" * 16, 2))
    assert node.receive() == ([CANCEL, Cancel(b"h" * 16, 2)], False)


def test_a_router_that_does_not_know_the_node_gets_a_new_hello(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.send(Introduce())
    assert node.receive() == ([], False)
    hello = router.receive()
    assert isinstance(hello, Hello)
    assert (hello.status.num_running, hello.session) == (2, 1)


def test_a_new_session_voids_what_was_asked_before(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    after = Cancel(b"n" * 16, 1)
    router.send(CANCEL, Welcome(2**40), after)
    assert node.receive() == ([after], True)
    router.send(Welcome(2**40), CANCEL)
    assert node.receive() == ([CANCEL], False)


def test_what_was_lost_on_its_way_from_the_router_is_asked_for_and_comes_in_order(
    node: Node, router: FakeRouter
) -> None:
    registered(node, router)
    lost = Cancel(b"l" * 16, 1)
    router.lose(lost)
    router.send(CANCEL)
    assert router.socket.poll(0) == 0
    wait_for(node.link.socket)
    assert node.link.receive(0.0) == ([], False)
    asked = router.receive()
    assert isinstance(asked, Resume)
    router.send_again(asked.first)
    assert node.receive() == ([lost, CANCEL], False)


def test_a_ping_shows_that_the_last_message_was_lost(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.lose(MARKER)
    router.send_raw(ROUTER_TO_NODE.encode(ping(router)))
    wait_for(node.link.socket)
    assert node.link.receive(0.0) == ([], False)
    asked = router.receive()
    assert isinstance(asked, Resume)
    router.send_again(asked.first)
    assert node.receive() == ([], False)


def test_a_message_that_comes_twice_counts_once(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    assert router.session is not None
    router.send_again(router.session.number + 1)
    router.send(CANCEL)
    assert node.receive() == ([CANCEL], False)


def test_what_the_router_missed_is_sent_again(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.leave(node.now_s)
    node.link.send_failed(b"h" * 16, 1, Overloaded("x"))
    said = [router.receive(), router.receive()]
    router.send(Resume(1, 2))
    assert node.receive() == ([], False)
    assert [router.receive(), router.receive()] == said


def test_what_the_router_has_acknowledged_is_not_kept(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.leave(node.now_s)
    router.receive()
    router.send_raw(ROUTER_TO_NODE.encode(ping(router)))
    router.send_raw(ROUTER_TO_NODE.encode(Resume(1, 2)))  # what it has just acknowledged
    is_void = False
    while not is_void:
        wait_for(node.link.socket)
        _, is_void = node.link.receive(0.0)
    assert not node.link.is_registered


def test_a_node_has_left_when_the_router_has_heard_it_and_nothing_is_missing(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    early = ping(router)
    node.link.leave(0.0)
    router.send(early)
    node.receive()
    assert not node.link.has_left(0.5), "the router sent this before it heard"
    router.receive()
    router.lose(CANCEL)
    router.send_raw(ROUTER_TO_NODE.encode(ping(router)))
    wait_for(node.link.socket)
    node.link.receive(0.5)
    assert not node.link.has_left(0.5), "a leg may be among what is missing"
    asked = router.receive()
    router.send_again(asked.first)
    router.send(ping(router))
    assert CANCEL in node.receive()[0]
    assert node.link.has_left(0.5)


def test_a_node_does_not_wait_long_for_a_router_that_is_silent(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.leave(5.0)
    assert not node.link.has_left(5.9)
    assert node.link.has_left(6.0)


def test_a_node_without_a_router_has_left(node: Node) -> None:
    node.link.leave(0.0)
    assert node.link.has_left(0.0)


def test_a_pong_says_how_far_both_are_and_what_is_alive(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.leave(node.now_s)
    router.receive()
    router.send(ping(router))
    node.receive()
    live = [RequestKey(b"h" * 16, 1), RequestKey(b"i" * 16, 70_000)]
    assert node.link.owes_pong
    node.link.answer_ping(live, 7, 800)
    assert router.session is not None
    pong = router.receive()
    assert isinstance(pong, Pong)
    assert (pong.session, pong.sent, pong.received) == (1, 2, router.session.sent)
    assert pong.live_keys == {live_key(*key) for key in live}
    assert (pong.num_other_legs, pong.num_other_prompt_tokens) == (7, 800)
    assert not node.link.owes_pong


def test_silence_voids_what_was_asked_once(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    assert node.link.receive(ROUTER_TIMEOUT_S - 0.1) == ([], False)
    assert node.link.receive(ROUTER_TIMEOUT_S) == ([], True)
    assert not node.link.is_registered
    assert node.link.receive(2 * ROUTER_TIMEOUT_S) == ([], False)


def test_a_ping_ends_the_silence(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.now_s = ROUTER_TIMEOUT_S - 0.1
    router.send(ping(router))
    assert node.receive() == ([], False)
    assert node.link.receive(2 * ROUTER_TIMEOUT_S - 0.2) == ([], False)
    assert node.link.receive(2 * ROUTER_TIMEOUT_S) == ([], True)


def test_a_router_that_speaks_again_after_its_silence_is_told_that_all_is_void(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.receive(2 * ROUTER_TIMEOUT_S)
    said = [router.receive()]  # on a new connection
    router.send(CANCEL, ping(router))
    for _ in range(WAIT_MS):
        node.link.socket.poll(1)
        assert node.link.receive(2 * ROUTER_TIMEOUT_S) == ([], False)
        if router.socket.poll(0):
            break
    said.append(router.receive())
    assert [(type(each), each.session) for each in said] == [(Hello, 0), (Hello, 0)]
    router.send(Welcome(2**40), CANCEL)
    assert node.receive() == ([CANCEL], True)


def test_a_node_whose_identity_was_taken_dials_again_after_the_silence(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    thief = links.open_socket(router.context, zmq.DEALER, SETTINGS)
    try:
        thief.setsockopt(zmq.IDENTITY, control_identity(EPOCH))
        links.connect(thief, router.address, SETTINGS)
        thief.send(NODE_TO_ROUTER.encode(Leaving(EPOCH)))
        assert isinstance(router.receive(), Leaving)
        assert node.link.receive(ROUTER_TIMEOUT_S) == ([], True)
        assert isinstance(router.receive(), Hello)
        thief.close(0)
        router.send(Welcome(2**40), CANCEL)
        assert node.receive() == ([CANCEL], True)
    finally:
        thief.close(0)


def test_a_router_that_never_came_is_not_silent(node: Node) -> None:
    assert node.link.receive(100 * ROUTER_TIMEOUT_S) == ([], False)


def test_a_refusal_ends_the_node_with_its_reason(node: Node, router: FakeRouter) -> None:
    router.receive()
    router.send(Refusal("model differs"))
    with pytest.raises(Refused, match="model differs"):
        node.receive()


def test_a_node_that_has_served_before_asks_a_router_that_refuses_it_again_later(
    node: Node, router: FakeRouter
) -> None:
    registered(node, router)
    router.send_raw(ROUTER_TO_NODE.encode(Refusal("another layout came first")))
    router.send_raw(ROUTER_TO_NODE.encode(Introduce()))
    wait_for(node.link.socket)
    assert node.link.receive(5.0) == ([], True)
    assert not node.link.is_registered
    assert router.socket.poll(50) == 0
    router.send_raw(ROUTER_TO_NODE.encode(Introduce()))
    wait_for(node.link.socket)
    assert node.link.receive(5.0 + FIRST_RETRY_S) == ([], False)
    assert isinstance(router.receive(), Hello)
    router.send(Welcome(2**40))
    assert node.receive() == ([], True)


def test_another_protocol_version_ends_the_node(node: Node, router: FakeRouter) -> None:
    router.receive()
    frame = bytearray(ROUTER_TO_NODE.encode(Welcome(1)))
    frame[2:4] = struct.pack("<H", PROTOCOL_VERSION + 1)
    router.send_raw(bytes(frame))
    with pytest.raises(Refused, match="version"):
        node.receive()


def test_a_message_that_does_not_decode_is_counted_and_costs_nothing_else(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.send_raw(b"")
    router.send_raw(b"garbage")
    router.send(CANCEL)
    assert node.receive() == ([CANCEL], False)
    assert node.link.num_rejected_messages == 2


def test_what_a_node_reports_arrives(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    event = TokenEvent(b"h" * 16, 1, 0, (5,), (), "", 0)
    node.link.send_tokens([])
    node.link.send_tokens([event])
    node.link.send_failed(b"h" * 16, 1, Overloaded("x" * 2000))
    node.link.leave(node.now_s)
    assert router.receive() == Tokens(EPOCH, (event,))
    assert router.receive() == Failed(b"h" * 16, 1, "overloaded", "x" * 1024)
    assert router.receive() == Leaving(EPOCH)


def test_a_large_cache_is_reported_in_several_messages(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    stored = [number.to_bytes(16, "little") for number in range(70_000)]
    node.link.send_cache_events(stored, [b"r" * 16], is_snapshot=True)
    first, second = router.receive(), router.receive()
    assert isinstance(first, CacheEvents)
    assert isinstance(second, CacheEvents)
    assert (first.is_snapshot, second.is_snapshot) == (True, False)
    assert first.stored + second.stored == b"".join(stored)
    assert first.removed + second.removed == b"r" * 16


def test_an_empty_snapshot_is_sent_too(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.link.send_cache_events([], [], is_snapshot=True)
    assert router.receive() == CacheEvents(EPOCH, True, b"", b"")


def test_what_was_said_last_arrives(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    frame = bytes(2**22)  # so much that it cannot have left when the link is closed
    for _ in range(4):
        node.link.socket.send(frame, copy=False)
    node.link.leave(node.now_s)
    node.link.close()
    for _ in range(4):
        assert router.socket.poll(WAIT_MS), "no message came"
        router.socket.recv_multipart()
    assert router.receive() == Leaving(EPOCH)
