"""A port for a program that a test starts and that cannot be told to choose one itself."""

from __future__ import annotations

import contextlib
import secrets
import socket

_FIRST, _LAST = 10_000, 32_000


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, below those that connections are given: while its program is not there, or not
    yet, no connection takes it."""
    while True:
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
