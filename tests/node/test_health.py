from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from unittest import mock

import pytest
from prometheus_client.core import CounterMetricFamily, Metric

from baton.engine.scheduler.step_costs import StepCosts
from baton.node.health import HealthServer
from baton.node.metrics import LinkCollector, NodeCollector
from baton.wire.errors import InvalidSetting
from baton.wire.messages.membership import NodeStatus


@dataclass
class Node:
    status: NodeStatus = field(default_factory=lambda: NodeStatus(1, 2, 5, 3, 2, 0.0))
    num_rejected_messages: int = 0
    complaint: str = ""

    def extra(self) -> Iterable[Metric]:
        yield CounterMetricFamily("baton:steps", "Steps", 7)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def server(node: Node) -> Iterator[HealthServer]:
    collector = NodeCollector(lambda: node.status, StepCosts(), {}, node.extra)
    server = HealthServer("127.0.0.1", 0, collector, lambda: node.complaint)
    yield server
    server.close()


def get(server: HealthServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.address + path, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_says_whether_the_node_is_registered(server: HealthServer) -> None:
    status, body = get(server, "/health")
    assert (status, json.loads(body)["status"]) == (503, "not registered")
    server.is_ready = True
    status, body = get(server, "/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")


def test_health_says_what_stands(server: HealthServer, node: Node) -> None:
    server.is_ready, node.complaint = True, "the engine loop has been still for 80 s"
    status, body = get(server, "/health")
    assert (status, json.loads(body)["status"]) == (503, "the engine loop has been still for 80 s")


def test_connections_that_say_nothing_take_a_bounded_number_of_threads(server: HealthServer) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    before = threading.active_count()
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
        # connections are taken in their order: all of these were, once this one is answered or refused
        with suppress(OSError, http.client.HTTPException):
            get(server, "/health")
        assert threading.active_count() - before <= 32
        for connection in idle:
            connection.close()
    deadline_s = time.monotonic() + 20
    while True:  # threads notice the end of their connections soon
        try:
            assert get(server, "/health")[0] == 503
            return
        except OSError:
            assert time.monotonic() < deadline_s


def test_a_request_is_answered_where_no_thread_can_be_started(server: HealthServer) -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=MemoryError):
        assert get(server, "/health")[0] == 503


def test_metrics_show_the_status_at_the_time_of_asking(server: HealthServer, node: Node) -> None:
    status, body = get(server, "/metrics")
    assert status == 200
    for line in (
        "baton:num_requests_running 1.0",
        "baton:num_requests_waiting 2.0",
        'baton:kv_blocks{state="free"} 5.0',
        'baton:kv_blocks{state="cached"} 3.0',
        'baton:kv_blocks{state="held"} 2.0',
        "baton:kv_cache_usage_perc 0.2",
        "baton:steps_total 7.0",
    ):
        assert line in body.splitlines()
    server.watch(LinkCollector(node))
    node.num_rejected_messages = 4
    assert "baton:rejected_messages_total 4.0" in get(server, "/metrics")[1].splitlines()
    node.status = NodeStatus(9, 2, 0, 0, 0, 0.0)
    assert "baton:num_requests_running 9.0" in get(server, "/metrics")[1].splitlines()


def test_other_paths_are_not_found(server: HealthServer) -> None:
    assert get(server, "/")[0] == 404


def test_a_taken_port_is_an_invalid_setting(server: HealthServer, node: Node) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(InvalidSetting, match=f"--http-port.*{port}"):
        HealthServer("127.0.0.1", port, NodeCollector(lambda: node.status, StepCosts(), {}, node.extra))
