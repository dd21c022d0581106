"""Which ways UCX may take, by the address a node listens on.

Owns what the environment of an agent says to UCX. Whatever the user set (`UCX_...`) stays as it is; `UCX_TLS` and
`UCX_NET_DEVICES` are added only where the user set neither.

- a loopback address: everything is on this machine. The loopback interface, and the copies between processes that UCX
  does without one: between GPUs those are CUDA IPC (NVLink, PCIe, or inside one GPU);
- the address of an interface: peers are other machines. That interface and every RDMA device, but none of the ways
  that only exist inside one machine: what crosses machines in production crosses the network in every test too. From
  and to a GPU that is GPUDirect RDMA, or TCP by way of host memory (`cuda_copy` stays);
- any other (0.0.0.0, a name that cannot be resolved): left to UCX.

For pools on a GPU it matters beyond speed whether CUDA IPC can be chosen (`may_use_cuda_ipc`): a peer that uses it
holds a mapping of the pool of its own. It is never used between machines: UCX can do that over multi-node NVLink, with
memory exported to the fabric, and is told not to. Three more settings are for an agent that shares its process with an
engine: `UCX_RCACHE_MAX_UNRELEASED` bounds how many registrations UCX keeps for memory that was freed,
`UCX_HANDLE_ERRORS` leaves fatal signals to the node, and `UCX_LOG_FILE` standard output, on which the node reports.
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
_CUDA_IPC = "cuda_ipc"
_IN_NODE = {"UCX_RCACHE_MAX_UNRELEASED": "1024", "UCX_HANDLE_ERRORS": "none", "UCX_LOG_FILE": "stderr"}
_ON_DEVICE = {"UCX_CUDA_IPC_ENABLE_MNNVL": "n"}


def ucx_environment(host: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with what UCX needs to know for an agent process of a node that listens on `host`."""
    return _with_ways(host, dict(environment), _INSIDE_ONE_MACHINE)


def node_environment(host: str, environment: Mapping[str, str], *, has_gpu: bool) -> dict[str, str]:
    """`environment` with what UCX needs to know for an agent in the node's own process. `has_gpu`: the node's pool is
    on one."""
    defaults = {**_IN_NODE, **(_ON_DEVICE if has_gpu else {})}
    return _with_ways(host, {**defaults, **environment}, f"{_INSIDE_ONE_MACHINE},{_CUDA_IPC}")


def _with_ways(host: str, chosen: dict[str, str], inside_one_machine: str) -> dict[str, str]:
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
        chosen["UCX_TLS"] = inside_one_machine
    return chosen


def may_use_cuda_ipc(environment: Mapping[str, str]) -> bool:
    """Whether UCX may choose CUDA IPC in this environment. True unless `UCX_TLS` excludes it beyond doubt."""
    value = environment.get("UCX_TLS", "all").strip().lower()
    names = {name.strip().lstrip("\\").partition(":")[0] for name in value.removeprefix("^").split(",")}
    if value.startswith("^"):
        return names.isdisjoint({_CUDA_IPC, "cuda"})
    return any(name in ("", "all", "cuda", _CUDA_IPC) or "*" in name for name in names)


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
