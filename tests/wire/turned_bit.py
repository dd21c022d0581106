"""A listener as it looks from behind a link that turned a bit of its first words: then ZMQ does not dial again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

MECHANISM = 12
"""The place of a byte of ZMTP's greeting: the first of the mechanism's name."""


@contextlib.contextmanager
def turned_once(port: int, place: int = MECHANISM) -> Iterator[str]:
    """The address of `port` over a link that turns a bit of byte `place` of what the listener says to the first that
    connects, and none later."""
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(*args: object) -> None:
        threads.append(threading.Thread(target=carry, args=args))
        threads[-1].start()

    def carry(source: socket.socket, target: socket.socket, turned: int) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(65536)):
                if at <= turned < at + len(chunk):
                    chunk[turned - at] ^= 1
                at += len(chunk)
                target.sendall(chunk)
        for each in (source, target):
            _shut(each)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                dealer, _ = listener.accept()
                to_listener = socket.create_connection(("127.0.0.1", port))
                start(dealer, to_listener, -1)
                start(to_listener, dealer, place if len(opened) == 1 else -1)
                opened.extend((dealer, to_listener))

    opened.append(socket.create_server(("127.0.0.1", 0)))
    accepting = threading.Thread(target=accept, args=opened[:1])
    accepting.start()
    try:
        yield f"tcp://127.0.0.1:{opened[0].getsockname()[1]}"
    finally:
        _shut(opened[0])
        accepting.join()
        for each in opened:
            _shut(each)
        for thread in threads:
            thread.join()
        for each in opened:
            each.close()


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
