"""What transports have in common that speak ZMQ: a socket that listens for senders, a socket dialled to a receiver.

Owns addresses, and noticing that a connection was made or broke. Knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.announced import GrantedWriter
from baton.wire import links
from baton.wire.errors import InvalidSetting, TransferFailed
from baton.wire.link_watch import open_watched


class ListeningReceiver(GrantedWriter):
    """A receiver that writes its own pool and hears of blocks over a socket of `kind`; `name` is its transport's.
    `port` 0: the system chooses.

    Raises `InvalidSetting` when `host`:`port` cannot be listened on.
    """

    def __init__(
        self,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        host: str,
        settings: links.LinkSettings,
        port: int = 0,
    ) -> None:
        super().__init__()
        self._name = name
        self._socket, address = links.listen(context, kind, host, port, settings)
        self._address = links.announced(address, settings)

    @property
    def endpoint(self) -> Endpoint:
        """The address of the socket."""
        return Endpoint(self._name, self._address)

    def wait_on(self) -> Sequence[Any]:
        """The socket on which senders' messages come."""
        return () if self._socket.closed else (self._socket,)


class Connection:
    """A sender's one connection: `socket`, which queues nothing for a receiver that does not answer.

    Raises `TransferFailed` for an address that cannot be dialled, and when there is no room for a socket.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: Endpoint, settings: links.LinkSettings
    ) -> None:
        try:
            self.socket, self._watch = open_watched(context, kind, settings)
        except zmq.ZMQError as error:
            raise TransferFailed(f"no socket for another node: {error}") from None
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            dial(self.socket, endpoint, settings)
        except TransferFailed:
            self.close()
            raise

    @property
    def monitor(self) -> zmq.Socket[bytes]:
        """The socket that is readable when the connection was made or broke."""
        return self._watch.monitor

    @property
    def is_made(self) -> bool:
        """Whether the connection was made."""
        return self._watch.is_made

    @property
    def has_broken(self) -> bool:
        """Whether the connection broke after it was made."""
        return self._watch.has_broken

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed it."""
        return bool(self.socket.closed)

    def watch(self) -> None:
        """Notice that the connection was made, or that it broke: it stays broken then."""
        self._watch.look()

    def close(self) -> None:
        """Drop the connection, and whatever is still queued on it."""
        if not self.is_closed:
            self._watch.close()
            self.socket.close(linger=0)


def dial(link: zmq.Socket[bytes], endpoint: Endpoint, settings: links.LinkSettings) -> str:
    """Connect `link` to a peer's endpoint. Returns the address. Raises `TransferFailed` when that cannot be dialled."""
    try:
        address = links.parse_address(endpoint.address, "peer endpoint")
        return links.connect(link, address, settings)
    except (InvalidSetting, zmq.ZMQError) as error:
        raise TransferFailed(f"the peer's endpoint cannot be dialled: {error}") from None
