"""ZMQ sockets as every link of Baton opens them: bounded, encrypted when a cluster key is set.

Owns the socket options. Does not know messages.
Invariants: no socket accepts a frame larger than its limit, none keeps a process alive at exit unless its owner
gives it time to send the rest when it closes it, and none listens beyond loopback without a cluster key.
"""

from __future__ import annotations

import ipaddress
import re
import socket as os_socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from baton.wire.codec import MAX_MESSAGE_BYTES
from baton.wire.errors import InvalidSetting
from baton.wire.keys import ClusterKey

HANDSHAKE_TIMEOUT_MS = 2_000
"""A handshake takes milliseconds. One whose frame has a bit turned in its length is waited for until then, and so are
the streams behind it; whoever connects tries again."""
KEEPALIVE_S = 1
"""Of TCP, after a second without traffic; four missed ones end the connection. ZMTP's own heartbeats stay off: libzmq
4.3.5 aborts the process when one is due on a connection that its peer has closed while our queue was full."""
MAX_MISSED_KEEPALIVES = 4
MAX_QUEUED_MESSAGES = 4_096
_KEY = re.compile("[0-9a-f]{64}")
ZAP_DOMAIN = "baton"
"""The ZAP domain of all listening sockets, by which the authenticator of a program recognises them."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Options of sockets. `max_message_bytes` bounds each received frame."""

    cluster_key: ClusterKey | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES + 64
    max_queued_messages: int = MAX_QUEUED_MESSAGES


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, settings: LinkSettings) -> zmq.Socket[bytes]:
    """A socket with Baton's options set, neither bound nor connected."""
    link = context.socket(kind)
    link.setsockopt(zmq.LINGER, 0)
    link.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes)
    link.setsockopt(zmq.SNDHWM, settings.max_queued_messages)
    link.setsockopt(zmq.RCVHWM, settings.max_queued_messages)
    link.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    link.setsockopt(zmq.HEARTBEAT_IVL, 0)
    link.setsockopt(zmq.TCP_KEEPALIVE, 1)
    link.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    link.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    link.setsockopt(zmq.TCP_KEEPALIVE_CNT, MAX_MISSED_KEEPALIVES)
    link.setsockopt(zmq.RECONNECT_IVL, 50)
    link.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    if kind == zmq.ROUTER:
        link.setsockopt(zmq.ROUTER_MANDATORY, 1)
        link.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return link


def bind(link: zmq.Socket[bytes], host: str, port: int, settings: LinkSettings, fd: int = -1) -> str:
    """Listen on `host`:`port` (0: the system chooses) and return the address for others, "tcp://host:port". `fd`: of a
    socket that listens there already; -1: none.

    Raises `InvalidSetting` when the port is taken or when `host` is reachable from outside without a cluster key.
    """
    require_key_beyond_loopback(host, settings.cluster_key)
    if settings.cluster_key is not None:
        link.setsockopt(zmq.CURVE_SERVER, 1)
        link.setsockopt(zmq.CURVE_SECRETKEY, settings.cluster_key.secret)
        link.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    shown = f"[{host}]" if ":" in host else host
    if ":" in host:
        link.setsockopt(zmq.IPV6, 1)
    if fd >= 0:
        link.setsockopt(zmq.USE_FD, fd)
    try:
        link.bind(f"tcp://{shown}:{port or '*'}")
    except zmq.ZMQError as error:
        raise InvalidSetting(f"cannot listen on {host}:{port}: {error}") from None
    return link.getsockopt_string(zmq.LAST_ENDPOINT)


def listen(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, settings: LinkSettings, fd: int = -1
) -> tuple[zmq.Socket[bytes], str]:
    """A socket of `kind` that listens, and its address for others. Raises as `bind`."""
    link = open_socket(context, kind, settings)
    try:
        return link, bind(link, host, port, settings, fd)
    except InvalidSetting:
        link.close()
        raise


def connect(link: zmq.Socket[bytes], address: str, settings: LinkSettings, attempt: int = 0) -> str:
    """Dial `address` ("tcp://host:port", with "#" and the key of who listens there, see `announced`); ZMQ keeps trying
    in the background. `attempt`: where the address names no key and several may be right, each attempt takes the next.

    Returns the address as ZMQ knows it. Raises `InvalidSetting` when the address names a key that is not expected.
    """
    address, _, named = address.partition("#")
    if settings.cluster_key is not None:
        expected = settings.cluster_key.expected
        if named and named not in [_as_hex(public) for public in expected]:
            raise InvalidSetting(f"the program at {address} has a key that is not known here")
        server = bytes(z85.encode(bytes.fromhex(named))) if named else expected[attempt % len(expected)]
        link.setsockopt(zmq.CURVE_SERVERKEY, server)
        link.setsockopt(zmq.CURVE_PUBLICKEY, settings.cluster_key.public)
        link.setsockopt(zmq.CURVE_SECRETKEY, settings.cluster_key.secret)
    if "[" in address:
        link.setsockopt(zmq.IPV6, 1)
    link.connect(address)
    return address


def num_expected_keys(settings: LinkSettings) -> int:
    """The number of keys that a dialled program may have; 1 without keys."""
    return 1 if settings.cluster_key is None else len(settings.cluster_key.expected)


def announced(address: str, settings: LinkSettings) -> str:
    """The address at which others reach a socket that listens, with the public key that they have to expect there."""
    key = settings.cluster_key
    return address if key is None else f"{address}#{_as_hex(key.public)}"


def _as_hex(public: bytes) -> str:
    return z85.decode(public).hex()


def require_key_beyond_loopback(host: str, key: ClusterKey | None) -> None:
    """Raise `InvalidSetting` when `host` is not a loopback address and there is no cluster key."""
    if key is None and not is_loopback(host):
        raise InvalidSetting(
            f"listening on {host} opens the KV and control plane to the network; make a key with `baton key FILE` and "
            "start every router and node of the deployment with --cluster-key FILE"
        )


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = os_socket.getaddrinfo(host, None)
    except OSError as error:
        raise InvalidSetting(f"host {host!r} does not resolve: {error}") from None
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def parse_address(address: str, name: str) -> str:
    """Normalise "host:port" or "tcp://host:port" to the latter, with the key that it names, if any. Raises
    `InvalidSetting` naming the setting."""
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    try:
        is_valid = parts.scheme == "tcp" and parts.hostname is not None and parts.port is not None
    except ValueError:
        is_valid = False
    if not is_valid or parts.path or not (parts.fragment == "" or _KEY.fullmatch(parts.fragment)):
        raise InvalidSetting(f"{name} {address!r:.100} is not an address of the form tcp://HOST:PORT")
    return f"tcp://{parts.netloc}" + ("#" + parts.fragment if parts.fragment else "")
