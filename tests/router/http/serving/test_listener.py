"""Who asks whether the router lives is heard before a crowd that came first."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvloop

from baton.router.http.serving import listener as module
from baton.router.http.serving.listener import Listener

NUM_CLIENTS = 60
PATIENCE_S = 30.0


class _Hears(asyncio.Protocol):
    """Notes what the first bytes of each connection are."""

    def __init__(self, heard: list[bytes], all_heard: asyncio.Event) -> None:
        self._heard, self._all_heard = heard, all_heard

    def data_received(self, data: bytes) -> None:
        self._heard.append(data)
        if len(self._heard) == NUM_CLIENTS + 1:
            self._all_heard.set()


@contextmanager
def _client(address: tuple[str, int], says: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(says)
        yield connection


async def _order(probe: bytes) -> list[bytes]:
    """What is heard, in its order, when a crowd and then a probe have connected before the loop turns."""
    heard: list[bytes] = []
    all_heard = asyncio.Event()

    def make() -> _Hears:
        return _Hears(heard, all_heard)

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, start_serving=False)
    listener = Listener(server, make, None)
    with ExitStack() as stack:
        for _ in range(NUM_CLIENTS):
            stack.enter_context(_client(listener.address, b"POST /v1/completions"))
        stack.enter_context(_client(listener.address, probe))
        async with asyncio.timeout(PATIENCE_S):
            await all_heard.wait()
        listener.close()
    return heard


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("path", ["/health", "/live", "/ready"])
def test_a_probe_begins_before_a_crowd_that_waits(path: str, loop_factory: type[asyncio.AbstractEventLoop]) -> None:
    probe = f"GET {path} HTTP/1.1".encode()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        heard = runner.run(_order(probe))
    assert heard.index(probe) < module._BEGUN_PER_TURN


def test_all_others_begin_in_the_order_of_their_arrival() -> None:
    with asyncio.Runner() as runner:
        heard = runner.run(_order(b"GET /v1/models HTTP/1.1"))
    assert heard.index(b"GET /v1/models HTTP/1.1") >= NUM_CLIENTS - module._BEGUN_PER_TURN
