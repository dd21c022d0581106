"""Listening sockets that this process owns and its children inherit.

A child that listens with an inherited socket may die and be started again: the port is never free meanwhile, and
whoever connects waits in the backlog for the next child instead of being refused.
Invariant: this process never accepts a connection.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from baton.wire.errors import InvalidSetting

MAX_PORT = 65_535
_BACKLOG = 1024
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors for an address that a name has and this machine has not, as ::1 of localhost without IPv6."""


class ListeningPort(NamedTuple):
    """A port, and the descriptors of the sockets that listen there, one for each address."""

    port: int
    fds: tuple[int, ...]


@contextmanager
def listening(host: str, port: int, flag: str) -> Iterator[ListeningPort]:
    """Listen on `port` (0: the system chooses) of every address of `host`. At its end the port is released, unless a
    child still has it.

    Raises `InvalidSetting` when it cannot be listened on, naming `flag`.
    """
    if not 0 <= port <= MAX_PORT:
        raise InvalidSetting(f"cannot listen on {host}:{port}: {flag} is from 0 to {MAX_PORT}")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidSetting(f"cannot listen on {host}:{port}: {error}") from None
    with ExitStack() as sockets:
        fds: list[int] = []
        failure: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            listener = sockets.enter_context(socket.socket(family))
            try:
                # a port that the system chose for the first address is that of the others too
                port = _listen(listener, str(address[0]), port)
                fds.append(listener.fileno())
            except OSError as error:
                if failure is None or error.errno not in _NOT_HERE:
                    failure = error
        if failure is not None and (not fds or failure.errno not in _NOT_HERE):
            raise InvalidSetting(f"cannot listen on {host}:{port}: {failure.strerror}; choose another port with {flag}")
        yield ListeningPort(port, tuple(fds))


def _listen(listener: socket.socket, address: str, port: int) -> int:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind((address, port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return int(listener.getsockname()[1])
