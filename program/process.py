"""Functions that every program of Baton calls when it starts: error reporting, logging, memory settings, and the check
that other programs have the cluster key."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.auth.thread

from wire.errors import BatonError
from wire.links import ZAP_DOMAIN, ClusterKey

_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD = -1, -3
_KEEP_BYTES = 2**30


def report_errors(run: Callable[[], None]) -> int:
    """Run a program's body; its exit status. A `BatonError` is one line on stderr."""
    try:
        run()
    except BatonError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def configure_logging(level: str) -> None:
    """Log to stderr."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory: if it returned the memory to the system, every step and message would fault pages
    in."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library: slower, not wrong
    mallopt(_MALLOC_MMAP_THRESHOLD, _KEEP_BYTES)
    mallopt(_MALLOC_TRIM_THRESHOLD, _KEEP_BYTES)


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from garbage collection. Call it once, at the end of a start.

    They live as long as the program, and each look through them would stop all requests for a tenth of a second.
    """
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class _OnlyKey:
    """ZAP decision: the one public key of the deployment. pyzmq hands over keys in Z85, as ours is."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


def start_authenticator(
    context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey | None
) -> zmq.auth.thread.ThreadAuthenticator | None:
    """With a cluster key, let only programs that hold it connect to the sockets of `context`."""
    if key is None:
        return None
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(ZAP_DOMAIN, _OnlyKey(key.public))
    return authenticator
