"""What every program of Baton does at its edges: report events and errors, log, let in only programs with the key."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.auth.thread

from engine.api.errors import BatonError
from engine.api.links import ZAP_DOMAIN, ClusterKey


def emit(**event: object) -> None:
    """One machine-readable line on stdout, for whoever started this program."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


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
