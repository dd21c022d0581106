"""Listening sockets that this process inherited from the one that started it, as descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from baton.wire.errors import InvalidSetting

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def inherited_sockets(fds: Sequence[int], flag: str) -> list[socket.socket]:
    """The sockets behind `fds`, which no child of this process inherits. Raises `InvalidSetting`, naming `flag`, for a
    descriptor that is not that of a listening TCP socket."""
    found: list[socket.socket] = []
    for fd in fds:
        try:
            os.set_inheritable(fd, False)
            found.append(socket.socket(fileno=fd))
            is_fit = found[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found[-1].family in _FAMILIES
        except (OSError, OverflowError, ValueError):
            is_fit = False
        if not is_fit:
            raise InvalidSetting(f"{flag} {fd} is not the descriptor of a listening socket")
        found[-1].setblocking(False)
    return found
