"""`baton drain` and `baton restart --rolling` against a router that a test plays."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from baton.launch.cli import main

ROLES = {"decode-0": "decode", "prefill-0": "prefill", "decode-1": "decode"}
GROUP = ("decode-0", "decode-1")


class Router(ThreadingHTTPServer):
    """After a node was drained, another router answers the first look at it, which does not know that yet. It leaves at
    the third look, and is back two looks later if it is to be started again. `log`: what was asked, and which
    nodes came back."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.log: list[str] = []
        self.authorizations: set[str | None] = set()
        self.comes_back = True
        self._looks: dict[str, int] = {}
        self._away: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def drain(self, order: dict[str, Any]) -> None:
        self.log.append(f"{order['node']} {'restart' if order['restart'] else 'drain'}")
        for node in GROUP if order["node"] == "rack" else (order["node"],):
            self._looks[node] = 0
            if not order["restart"] or not self.comes_back:
                self._away.add(node)

    def nodes(self) -> list[dict[str, Any]]:
        found = []
        for node, role in ROLES.items():
            num_looks = self._looks.get(node)
            if num_looks is not None:
                self._looks[node] = num_looks + 1
                if num_looks == 4 and node not in self._away:
                    del self._looks[node]
                    self.log.append(f"{node} is back")
                elif num_looks >= 3:
                    continue
            is_leaving, life = self._looks.get(node, 1) > 1, self.log.count(f"{node} is back")
            group = "rack" if node in GROUP else ""
            found.append({"id": node, "group": group, "role": role, "life": life, "is_leaving": is_leaving})
        return found


class Handler(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        assert self.path == "/server_info"
        self._send(200, {"nodes": self.server.nodes()})

    def do_POST(self) -> None:
        assert self.path == "/admin/drain"
        self.server.authorizations.add(self.headers["Authorization"])
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if order["node"] not in (*ROLES, "rack"):
            self._send(404, {"error": {"message": "no node of that name is registered", "param": "node"}})
            return
        self.server.drain(order)
        self._send(200, {"node": order["node"], "num_requests": 3})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _send(self, status: int, payload: dict[str, Any]) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.setattr("baton.launch.drain._POLL_S", 0.001)
    with Router() as router:
        thread = threading.Thread(target=router.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield router
        router.shutdown()
        thread.join()


def test_drain_waits_until_the_node_has_left(
    router: Router, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "sesame")
    assert main(["drain", "decode-1", "--url", router.url + "/v1"]) == 0
    assert router.log == ["decode-1 drain"]
    assert router.authorizations == {"Bearer sesame"}
    assert capsys.readouterr().err == "decode-1 drains: 3 requests\ndecode-1 has left\n"


def test_nodes_are_restarted_one_after_another(router: Router) -> None:
    assert main(["restart", "--rolling", "--url", router.url]) == 0
    assert router.log == [
        step for node in ("prefill-0", "decode-0", "decode-1") for step in (f"{node} restart", f"{node} is back")
    ]


def test_only_the_named_nodes_are_restarted(router: Router) -> None:
    assert main(["restart", "--rolling", "decode-1", "--url", router.url]) == 0
    assert router.log == ["decode-1 restart", "decode-1 is back"]


def test_a_group_is_drained_and_restarted_as_one(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "--rolling", "rack", "--url", router.url]) == 0
    assert router.log == ["rack restart", "decode-0 is back", "decode-1 is back"]
    assert main(["drain", "rack", "--url", router.url]) == 0
    assert {node["id"] for node in router.nodes()} == {"prefill-0"}
    assert capsys.readouterr().err.endswith("rack has left\n")


def test_a_node_that_does_not_come_back_stops_the_restart(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    router.comes_back = False
    assert main(["restart", "--rolling", "--url", router.url, "--timeout-s", "0.2"]) == 1
    assert router.log == ["prefill-0 restart"]
    assert "error: after 0.2 s prefill-0 does not serve again" in capsys.readouterr().err


def test_an_unknown_node_is_an_error(router: Router, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "decode-7", "--url", router.url]) == 1
    assert "error: no node of that name is registered (HTTP 404)" in capsys.readouterr().err


def test_restart_has_to_be_a_rolling_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["restart"])
    assert "--rolling is missing" in capsys.readouterr().err
