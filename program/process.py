"""What every program of Baton does at its edges: report errors, log, set up its memory, let in only programs that have
the cluster key."""

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
    """Let glibc reuse freed memory: giving it back makes every step, and every message, fault its pages in again."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library: slower, not wrong
    mallopt(_MALLOC_MMAP_THRESHOLD, _KEEP_BYTES)
    mallopt(_MALLOC_TRIM_THRESHOLD, _KEEP_BYTES)


def spare_what_lasts() -> None:
    """At the end of a start: tell the garbage collector to pass over everything that exists.

    It would find no garbage there, and stop every request for a tenth of a second each time.
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
