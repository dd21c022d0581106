"""Which ways UCX may take, by the address a node listens on.

Owns the environment of the agent process. Whatever the user set (`UCX_...`) stays as it is; only `UCX_TLS` and
`UCX_NET_DEVICES` are ever added, and only where the user set neither.

- a loopback address: everything is on this machine. The loopback interface, and the copies between processes that UCX
  does without one;
- the address of an interface: peers are other machines. That interface and every RDMA device, but none of the ways
  that only exist inside one machine: what crosses machines in production crosses the network in every test too;
- any other (0.0.0.0, a name that cannot be resolved): left to UCX.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_SIOCGIFADDR = 0x8915
_RDMA = Path("/sys/class/infiniband")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_INSIDE_ONE_MACHINE = "^posix,sysv,cma,xpmem"


def ucx_environment(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with what UCX needs to know for a node that listens on `host`."""
    chosen = dict(environment)
    if "UCX_TLS" in chosen or "UCX_NET_DEVICES" in chosen:
        return chosen
    address = _resolve(host)
    if address is None or address.is_unspecified:
        return chosen
    interface = _interface_of(address)
    if address.is_loopback:
        chosen["UCX_NET_DEVICES"] = interface or "lo"
    elif interface is not None:
        chosen["UCX_NET_DEVICES"] = ",".join([interface, *_rdma_devices()])
        chosen["UCX_TLS"] = _INSIDE_ONE_MACHINE
    return chosen


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    except (OSError, ValueError, UnicodeError):
        return None


def _interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """The interface that carries this address."""
    if address.is_loopback:
        address = ipaddress.ip_address("127.0.0.1")
    if isinstance(address, ipaddress.IPv6Address):
        return _ipv6_interface(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if answer[20:24] == address.packed:
                return name
    return None


def _ipv6_interface(address: ipaddress.IPv6Address) -> str | None:
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.split()[0] == address.packed.hex()), None)


def _rdma_devices() -> list[str]:
    """Every RDMA device and port as UCX names them, "mlx5_0:1"."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in _RDMA.glob("*/ports/*"))
