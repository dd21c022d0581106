"""The router's end of the control connections, as a plain ROUTER socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from baton.node.router_link import RouterLink
from baton.wire import links
from baton.wire.errors import InvalidSetting
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.messages.legs import Cancel, Decode, HandOver
from baton.wire.messages.membership import Hello, NodeStatus, Ping, Welcome, control_identity
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.request_key import owner_of_epoch
from baton.wire.session import Session, number_of

EPOCH = 77
STATUS = NodeStatus(1, 2, 3, 4, 5, 0.0)
LAYOUT = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=1, head_dim=8)])
HELLO = Hello("decode", "d", EPOCH, "fingerprint", LAYOUT, "", "http://127.0.0.1:1", 8, 32, 4, STATUS, "")
SETTINGS = links.LinkSettings()
WAIT_MS = 5000


def marker_of(epoch: int) -> Cancel:
    """The last message of every `FakeRouter.send`: a node that has it has all messages before it."""
    return Cancel(owner_of_epoch(epoch) + b"marker", 1)


MARKER = marker_of(0)


class FakeRouter:
    """Receives what nodes send and answers what a test tells it to. `epoch` is that of its life."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int = 0, epoch: int = 0) -> None:
        self.context = context
        self.epoch = epoch
        self.socket = links.open_socket(context, zmq.ROUTER, SETTINGS)
        self.address = self._bind(port)
        self.identity = control_identity(EPOCH)
        self.session: Session | None = None

    def _bind(self, port: int) -> str:
        """A socket that was closed gives its port up a moment later."""
        deadline_s = time.monotonic() + WAIT_MS / 1000
        while True:
            try:
                return links.bind(self.socket, "127.0.0.1", port, SETTINGS)
            except InvalidSetting:
                if time.monotonic() > deadline_s:
                    self.socket.close()  # or nobody can end the context
                    raise
                time.sleep(0.01)

    def receive(self) -> Any:
        """The next message of any node; notes who sent it, and accepts its number if it has one."""
        assert self.socket.poll(WAIT_MS), "no message came"
        self.identity, *frames = self.socket.recv_multipart()
        if number := number_of(frames):
            assert self.session is not None
            self.session.accept(number)
        return NODE_TO_ROUTER.decode(frames[-1])

    def send(self, *messages: object) -> None:
        """Send to the node that was heard last, with a marker behind it once the node is in a session."""
        for message in messages:
            if isinstance(message, Welcome) and (self.session is None or self.session.number != message.session):
                self.session = Session(message.session, ROUTER_TO_NODE)
            if isinstance(message, Cancel | Decode | HandOver):
                self._send_numbered(message)
            else:
                self.send_raw(ROUTER_TO_NODE.encode(message))
        if self.session is not None:
            self._send_numbered(marker_of(self.epoch))

    def ping(self) -> None:
        """Say how far this end of the session is."""
        assert self.session is not None
        self.send_raw(ROUTER_TO_NODE.encode(Ping(self.session.number, self.session.sent, self.session.received)))

    def lose(self, message: object) -> None:
        """Send something that never arrives."""
        assert self.session is not None
        self.session.frames(message)

    def send_again(self, first: int) -> None:
        """Send again from that number on."""
        assert self.session is not None
        for frames in self.session.since(first) or ():
            self.send_raw(*frames)

    def send_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.identity, *frames])

    def _send_numbered(self, message: object) -> None:
        assert self.session is not None
        self.send_raw(*self.session.frames(message))


class Node:
    """A `RouterLink` with a clock that the test sets. `address`: "" for the router's own."""

    def __init__(self, router: FakeRouter, address: str = "") -> None:
        self.num_hellos = 0
        self.now_s = 0.0
        self.link = RouterLink(router.context, address or router.address, SETTINGS, HELLO, self._status, self.now_s)

    def receive(self) -> tuple[list[Any], bool]:
        """What the router sent at once."""
        requests: list[Any] = []
        is_void = False
        while not requests or requests[-1] != MARKER:
            assert self.link.socket.poll(WAIT_MS), "no message came"
            more, is_more_void = self.link.receive(self.now_s)
            requests = more if is_more_void else requests + more
            is_void = is_void or is_more_void
        return requests[:-1], is_void

    def close(self) -> None:
        self.link.close()

    def _status(self) -> NodeStatus:
        self.num_hellos += 1
        return replace(STATUS, num_running=self.num_hellos)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def router(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[FakeRouter]:
    router = FakeRouter(context)
    yield router
    router.socket.close()


@pytest.fixture
def node(router: FakeRouter) -> Iterator[Node]:
    node = Node(router)
    yield node
    node.link.close()


@pytest.fixture
def make_router(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[[int], FakeRouter]]:
    """Opens routers at a given port."""
    made: list[FakeRouter] = []

    def make(port: int) -> FakeRouter:
        made.append(FakeRouter(context, port))
        return made[-1]

    yield make
    for router in made:
        router.socket.close()
