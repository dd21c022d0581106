"""What UCX is told, by the address a node listens on and where its pool lies."""

from __future__ import annotations

import pytest

from baton.kvtransfer.transports.nixl.ucx import may_use_cuda_ipc, node_environment, ucx_environment


def test_ways_for_pools_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._interface_of", lambda address: "eth7")
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._rdma_devices", lambda: ["mlx5_0:1"])
    across = node_environment("10.1.2.3", {}, has_gpu=True)
    assert across["UCX_TLS"] == "^posix,sysv,cma,xpmem,cuda_ipc"
    assert across["UCX_NET_DEVICES"] == "eth7,mlx5_0:1"
    inside = node_environment("127.0.0.1", {}, has_gpu=True)
    assert "UCX_TLS" not in inside
    assert inside["UCX_CUDA_IPC_ENABLE_MNNVL"] == "n"
    assert "UCX_CUDA_IPC_ENABLE_MNNVL" not in node_environment("127.0.0.1", {}, has_gpu=False)
    assert node_environment("127.0.0.1", {"UCX_HANDLE_ERRORS": "bt"}, has_gpu=True)["UCX_HANDLE_ERRORS"] == "bt"


@pytest.mark.parametrize(
    ("tls", "may"),
    [
        (None, True),
        ("all", True),
        ("tcp,cuda_copy,cuda_ipc", True),
        ("cuda,tcp", True),
        ("\\cuda_ipc,tcp", True),
        ("tcp,cuda_copy,self", False),
        ("^cma", True),
        ("^cma,cuda_ipc", False),
        ("^cuda", False),
        ("tcp,cuda*", True),
    ],
)
def test_whether_cuda_ipc_can_be_chosen(tls: str | None, may: bool) -> None:
    assert may_use_cuda_ipc({} if tls is None else {"UCX_TLS": tls}) == may


def test_loopback_stays_on_the_loopback_interface() -> None:
    assert ucx_environment("127.0.0.1", {"PATH": "x"}) == {"PATH": "x", "UCX_NET_DEVICES": "lo"}
    assert ucx_environment("::1", {}) == {"UCX_NET_DEVICES": "lo"}


def test_the_interface_of_an_address_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", False)  # as if it were one like any other
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._rdma_devices", lambda: [])
    assert ucx_environment("127.0.0.1", {})["UCX_NET_DEVICES"] == "lo"


def test_an_address_of_an_interface_keeps_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._interface_of", lambda address: "eth7")
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._rdma_devices", lambda: ["mlx5_0:1"])
    chosen = ucx_environment("10.1.2.3", {})
    assert chosen == {"UCX_NET_DEVICES": "eth7,mlx5_0:1", "UCX_TLS": "^posix,sysv,cma,xpmem"}


@pytest.mark.parametrize("name", ["UCX_TLS", "UCX_NET_DEVICES"])
def test_what_the_user_chose_for_ucx_stays(name: str) -> None:
    assert ucx_environment("127.0.0.1", {name: "mine"}) == {name: "mine"}


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.9"])
def test_an_address_of_no_interface_is_left_to_ucx(host: str) -> None:
    assert ucx_environment(host, {}) == {}
