"""Ports that this process keeps for a child which will listen on them.

Invariant: between the reservation and the child's own `listen` nobody else gets the port, on Linux: there a second
socket with SO_REUSEADDR may bind while none listens, and the system hands a bound port to nobody. Elsewhere the port is
only checked and free again at once.
"""

from __future__ import annotations

import socket
import sys

from wire.errors import InvalidSetting

MAX_PORT = 65_535


class ReservedPort:
    """Port `port` of `host` (0: the system chooses), kept until `close`, over any number of children.

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
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
