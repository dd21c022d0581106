"""The connection of a decode node to a prefill node, over real sockets."""

from __future__ import annotations

import time
from typing import Any, cast

import zmq

from baton.kvtransfer.messages import RECEIVER_TO_SENDER, Endpoint, PeerHello
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.wire import links
from baton.wire.messages import PrefillPeer
from tests.kvtransfer.pair import receiving_facts
from tests.wire.turned_bit import turned_once

SETTINGS = links.LinkSettings()


class ReadyReceiver:
    """A receiver that has nothing to wait for."""

    endpoint = Endpoint("loopback", "D")
    is_ready = True


def test_a_peer_is_greeted_although_a_bit_of_the_handshake_was_turned() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener, address = links.listen(context, zmq.ROUTER, "127.0.0.1", 0, SETTINGS)
    connections = ReceiverConnections(receiving_facts(), context, SETTINGS, [cast(Any, ReadyReceiver())])
    try:
        with turned_once(int(address.rsplit(":", 1)[1])) as damaged:
            connections.to(PrefillPeer("P", 1, damaged), time.monotonic())
            deadline_s = time.monotonic() + 20.0
            while not listener.poll(10):
                assert time.monotonic() < deadline_s
                connections.dial_broken_again(time.monotonic())
            assert isinstance(RECEIVER_TO_SENDER.decode(listener.recv_multipart()[-1]), PeerHello)
            connections.close()
    finally:
        listener.close()
        connections.close()
        context.term()
