"""TLS in front of a server that has none: what comes is deciphered and passed on, in threads that end with it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def tls_front(port: int, certificate: Path) -> Iterator[int]:
    """The port at which the server at `port` answers in TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, port), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, port), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with (
        suppress(OSError),
        client,
        socket.create_connection(("127.0.0.1", port)) as server,
        context.wrap_socket(client, server_side=True) as secured,
    ):
        threading.Thread(target=_copy, args=(server, secured), daemon=True).start()
        _copy(secured, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
