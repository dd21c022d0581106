"""Ports that this process reserves for a child which will listen on them.

Invariant: on Linux no other process gets the port between the reservation and the child's own `listen`: a second socket
with SO_REUSEADDR may bind while none listens, and the system gives a bound port to no other socket. On other systems
the port is only checked, and is free again at once.
"""

from __future__ import annotations

import socket
import sys

from wire.errors import InvalidSetting

MAX_PORT = 65_535


class ReservedPort:
    """Port `port` of `host` (0: the system chooses), reserved until `close`, over any number of children.

    Raises `InvalidSetting` when something listens there already, naming `flag`.
    """

    def __init__(self, host: str, port: int, flag: str) -> None:
        if not 0 <= port <= MAX_PORT:
            raise InvalidSetting(f"cannot listen on {host}:{port}: {flag} is from 0 to {MAX_PORT}")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            raise InvalidSetting(f"cannot listen on {host}:{port}: {error}") from None
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise InvalidSetting(f"cannot listen on {host}:{port}: {error}; choose another port with {flag}") from None
        self.port: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
