from __future__ import annotations

import struct

import pytest

from node.router_link import ROUTER_TIMEOUT_S
from tests.node.conftest import EPOCH, WAIT_MS, FakeRouter, Node
from wire.codec import PROTOCOL_VERSION
from wire.errors import Overloaded, Refused
from wire.messages import (
    ROUTER_TO_NODE,
    CacheEvents,
    Cancel,
    Failed,
    Hello,
    Introduce,
    Leaving,
    Ping,
    Refusal,
    TokenEvent,
    Tokens,
    Welcome,
    control_identity,
)

CANCEL = Cancel(b"h" * 16, 1)


def registered(node: Node, router: FakeRouter, router_epoch: int = 1) -> None:
    assert isinstance(router.receive(), Hello)
    router.send(Welcome(router_epoch))
    assert node.receive() == ([], False)
    assert node.link.is_registered


def test_a_node_introduces_itself_under_its_epoch_and_is_welcomed(node: Node, router: FakeRouter) -> None:
    assert not node.link.is_registered
    registered(node, router)
    assert router.identity == control_identity(EPOCH)


def test_requests_arrive_in_order(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.send(CANCEL, Ping(1), Cancel(b"h" * 16, 2))
    assert node.receive() == ([CANCEL, Cancel(b"h" * 16, 2)], False)


def test_a_router_that_does_not_know_the_node_gets_a_new_hello(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    router.send(Introduce(1))
    assert node.receive() == ([], False)
    hello = router.receive()
    assert isinstance(hello, Hello)
    assert hello.status.num_running == 2


def test_another_router_epoch_voids_what_was_asked_before(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    after = Cancel(b"n" * 16, 1)
    router.send(CANCEL, Introduce(2), after)
    assert node.receive() == ([after], True)
    router.send(Welcome(2), CANCEL)
    assert node.receive() == ([CANCEL], False)


def test_silence_voids_what_was_asked_once(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    assert node.link.receive(ROUTER_TIMEOUT_S - 0.1) == ([], False)
    assert node.link.receive(ROUTER_TIMEOUT_S) == ([], True)
    assert not node.link.is_registered
    assert node.link.receive(2 * ROUTER_TIMEOUT_S) == ([], False)


def test_a_ping_ends_the_silence(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.now_s = ROUTER_TIMEOUT_S - 0.1
    router.send(Ping(1))
    assert node.receive() == ([], False)
    assert node.link.receive(2 * ROUTER_TIMEOUT_S - 0.2) == ([], False)
    assert node.link.receive(2 * ROUTER_TIMEOUT_S) == ([], True)


def test_a_router_that_speaks_again_after_its_silence_has_the_node_registered(node: Node, router: FakeRouter) -> None:
    registered(node, router)
    node.now_s = 2 * ROUTER_TIMEOUT_S
    node.link.receive(node.now_s)
    router.send(Ping(1))
    assert node.receive() == ([], False)
    assert node.link.is_registered


def test_a_router_that_never_came_is_not_silent(node: Node) -> None:
    assert node.link.receive(100 * ROUTER_TIMEOUT_S) == ([], False)


def test_a_refusal_ends_the_node_with_its_reason(node: Node, router: FakeRouter) -> None:
    router.receive()
    router.send(Refusal("model differs"))
    with pytest.raises(Refused, match="model differs"):
        node.receive()


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
    node.link.leave()
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
    node.link.leave()
    node.link.close()
    for _ in range(4):
        assert router.socket.poll(WAIT_MS), "no message came"
        router.socket.recv_multipart()
    assert router.receive() == Leaving(EPOCH)
