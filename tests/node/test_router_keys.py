"""A node finds its router while keys are rotated: by the newest key, or by the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from baton.launch.key import role_file, rotate, write_role_keys
from baton.node.heartbeat import HeartbeatThread
from baton.node.router_link import NEXT_KEY_S, RouterLink
from baton.runtime.process import start_authenticator
from baton.wire import links
from baton.wire.keys import ROUTER, KeyRing
from baton.wire.links import LinkSettings
from baton.wire.messages.membership import DECODE, Hello, Welcome
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from tests.node.conftest import EPOCH, HELLO, STATUS, WAIT_MS

Context = zmq.Context[zmq.Socket[bytes]]
Listen = Callable[[bool], tuple[zmq.Socket[bytes], str, LinkSettings]]


@pytest.fixture
def listen(context: Context, tmp_path: Path) -> Iterator[Listen]:
    """`listen(is_new)`: a router with the new key or that of before, and how a node with both dials it."""
    folder = tmp_path / "keys"
    stop: list[Callable[[], object]] = []

    def begin(is_new: bool) -> tuple[zmq.Socket[bytes], str, LinkSettings]:
        write_role_keys(folder)
        old = KeyRing(role_file(folder, ROUTER), ROUTER)
        rotate(folder)
        old.reload()
        router = KeyRing(role_file(folder, ROUTER), ROUTER) if is_new else old
        node = KeyRing(role_file(folder, DECODE), DECODE)
        authenticator = start_authenticator(context, router)
        assert authenticator is not None
        settings = LinkSettings(cluster_key=router.towards(DECODE))
        socket, address = links.listen(context, zmq.ROUTER, "127.0.0.1", 0, settings)
        stop.extend((authenticator.stop, socket.close))
        return socket, address, LinkSettings(cluster_key=node.towards(ROUTER))

    yield begin
    for each in stop:
        each()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_node_registers_with_a_router_of_either_key(context: Context, listen: Listen, is_new: bool) -> None:
    socket, address, settings = listen(is_new)
    link = RouterLink(context, address, settings, HELLO, lambda: STATUS, 0.0)
    try:
        if not is_new:
            assert not socket.poll(200)
            link.receive(NEXT_KEY_S)
        assert socket.poll(WAIT_MS)
        identity, frame = socket.recv_multipart()
        assert isinstance(NODE_TO_ROUTER.decode(frame), Hello)
        socket.send_multipart([identity, ROUTER_TO_NODE.encode(Welcome(2**40))])
        assert link.socket.poll(WAIT_MS)
        assert link.receive(NEXT_KEY_S) == ([], True)
        assert link.is_registered
    finally:
        link.close()


def test_heartbeats_find_a_router_that_still_has_the_key_of_before(context: Context, listen: Listen) -> None:
    socket, address, settings = listen(False)
    heartbeat = HeartbeatThread(context, [address], settings, EPOCH, STATUS, interval_s=0.1)
    try:
        assert socket.poll(WAIT_MS)
    finally:
        heartbeat.stop()
