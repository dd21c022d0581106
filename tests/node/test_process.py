"""A node process around an engine and a leg that do nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from baton.engine.build import Engine
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore
from baton.engine.executor.uni import UniExecutor
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.scheduler import Scheduler
from baton.kvtransfer.transports.registry import RECEIVER
from baton.node import process
from baton.node.pool import Ends, NodeParts
from baton.node.process import run_node
from baton.node.role import Role
from baton.node.router_link import RouterLink
from baton.node.settings import NodeSettings
from baton.node.sharing_leg import SharingLeg
from baton.ranks.executor.starting import LocalRanks
from baton.runtime.events import Ready, parse_event
from baton.runtime.watchdog import INTERPRETER_WATCHDOG
from baton.wire.errors import InvalidSetting, Refused
from baton.wire.messages.membership import DECODE, Hello, Leaving, Refusal, Welcome
from tests.engine.cache.disk.tiers_on_disk import until
from tests.free_port import free_port
from tests.node.conftest import LAYOUT, FakeRouter
from tests.node.kv_events.reader import Reader

WAIT_S = 30.0


def open_leg(engine: Engine, ends: Ends) -> tuple[SharingLeg, str]:
    """A leg that does nothing."""
    leg = SimpleNamespace(
        num_live=0,
        wait_on=list,
        take_failures=list,
        metrics=list,
        poll=lambda now_s: None,
        cancel=lambda key, now_s: None,
        cancel_all=lambda now_s, owner: None,
        live_keys=list,
        can_pull=True,
        take_arrived=list,
    )
    return cast(SharingLeg, leg), "tcp://127.0.0.1:3"


@dataclass
class NoPool:
    """The pool of a node, and its ends: there are none. `closed`: what of a node was closed, in order."""

    ranks: LocalRanks = field(default_factory=LocalRanks)
    closed: list[str] = field(default_factory=list)

    def allocate(self, num_bytes: int) -> Any:
        raise NotImplementedError

    def open_ends(self, parts: NodeParts) -> Any:
        parts.watch("kv-idle thread")
        return SimpleNamespace(close=lambda: self.closed.append("ends"))

    def close(self) -> None:
        self.closed.append("pool")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the nodes of this process, which get an engine without a model: what was closed, in order."""
    no_pool = NoPool()
    device = SimpleNamespace(close=lambda: no_pool.closed.append("device"))
    pool = BlockPool(16)
    runner = cast(Any, SimpleNamespace(is_asynchronous=False))
    core = EngineCore(pool, Scheduler(pool, SchedulerLimits(4, 4, 16, 64), frozenset()), runner, "f")
    memory = SimpleNamespace(layout=LAYOUT)
    engine = SimpleNamespace(
        core=core,
        learn_costs=lambda: None,
        device=device,
        memory=memory,
        fingerprint="f",
        num_blocks=16,
        max_request_tokens=64,
        tokenizer_digest="",
        executor=UniExecutor(),
        loans=None,
        adapters={},
    )
    monkeypatch.setattr(process, "build_engine", lambda *arguments: engine)
    monkeypatch.setattr(process, "NodePool", lambda *arguments: no_pool)
    for name in ("configure_logging", "keep_freed_memory", "freeze_startup_objects"):  # they change the whole process
        monkeypatch.setattr(process, name, lambda *arguments: None)
    return no_pool.closed


@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """Runs a function beside a node, which needs the main thread for its signals."""
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit


def health_of(address: str) -> int:
    """The status of `/health`."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def serve(router: FakeRouter, **settings: Any) -> None:
    run_node(NodeSettings(router=router.address, **settings), Role(DECODE, RECEIVER, open_leg))


def test_a_node_is_ready_once_the_router_has_welcomed_it_and_leaves_when_asked(
    closed: list[str],
    router: FakeRouter,
    meanwhile: Callable[[Callable[[], Any]], Future[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def welcome() -> Hello:
        hello = router.receive()
        assert health_of(hello.http_address) == 503
        router.send(Welcome(1))
        while health_of(hello.http_address) != 200:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        while not isinstance(router.receive(), Leaving):
            pass
        return cast(Hello, hello)

    welcomed = meanwhile(welcome)
    serve(router)
    hello = welcomed.result(WAIT_S)
    assert hello.start_ms > 0
    said = capsys.readouterr().out.splitlines()
    assert list(map(parse_event, said)) == [Ready(DECODE, hello.http_address, peer_address="tcp://127.0.0.1:3")]
    assert closed == ["ends", "device", "pool"]


@pytest.mark.parametrize(("timeout_s", "most_s"), [(3.0, 3.0), (600.0, process.SAVE_S)])
def test_a_node_that_ends_saves_its_cache_in_the_time_that_it_has(
    closed: list[str],
    router: FakeRouter,
    meanwhile: Callable[[Callable[[], Any]], Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    most_s: float,
) -> None:
    times_left: list[float] = []

    def save(core: EngineCore, time_left_s: Callable[[], float]) -> None:
        closed.append("nothing yet")
        times_left.append(time_left_s())
        os.kill(os.getpid(), signal.SIGTERM)  # somebody does not want to wait
        times_left.append(time_left_s())

    def ask() -> None:
        router.receive()
        router.send(Welcome(1))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(EngineCore, "save", save)
    asked = meanwhile(ask)
    serve(router, shutdown_timeout_s=timeout_s)
    asked.result(WAIT_S)
    assert closed == ["nothing yet", "ends", "device", "pool"]
    assert 0 < times_left[0] <= most_s
    assert times_left[1] <= 0


def test_what_turns_in_a_node_is_watched(
    closed: list[str], router: FakeRouter, meanwhile: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    def ask() -> str:
        hello = router.receive()
        router.send(Welcome(1))
        while health_of(hello.http_address) != 200:
            pass
        with urllib.request.urlopen(f"{hello.http_address}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        commands = [child.cmdline() for child in psutil.Process().children()]
        watchdogs = [command[-1] for command in commands if command[-4:-3] == [str(INTERPRETER_WATCHDOG)]]
        os.kill(os.getpid(), signal.SIGTERM)
        return f"{text}{watchdogs}"

    asked = meanwhile(ask)
    serve(router)
    for part in ("engine loop", "heartbeat thread", "kv-idle thread"):
        assert f'baton:watchdog_still_seconds{{part="{part}"}}' in asked.result(WAIT_S)
    assert asked.result(WAIT_S).endswith("['300']" if sys.platform == "linux" else "[]"), "the interpreter's watchdog"


def test_a_node_publishes_kv_events_where_it_is_told_to(
    closed: list[str], router: FakeRouter, meanwhile: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    def ask() -> str:
        hello = router.receive()
        router.send(Welcome(1))
        try:
            with Reader(config["endpoint"], config["replay_endpoint"]) as reader:
                until(lambda: [number for number, _ in reader.replay(0)] == [0])
            with urllib.request.urlopen(f"{hello.http_address}/metrics", timeout=WAIT_S) as answer:
                text: str = answer.read().decode()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        return text

    config = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    asked = meanwhile(ask)
    serve(router, kv_events_config=json.dumps({"enable_kv_cache_events": True, **config}))
    assert "baton:kv_event_batches_total 1.0" in asked.result(WAIT_S)
    assert "baton:kv_event_replays_total" in asked.result(WAIT_S)
    assert "kv-events" not in [thread.name for thread in threading.enumerate()]


def test_kv_events_without_a_prefix_cache_are_refused_before_anything_is_loaded(
    closed: list[str], router: FakeRouter
) -> None:
    with pytest.raises(InvalidSetting, match="--enable-prefix-caching"):
        serve(router, kv_events_config='{"enable_kv_cache_events": true}', enable_prefix_caching=False)
    assert closed == ["pool"]


def test_health_may_be_asked_before_there_is_a_link_to_the_router(
    closed: list[str],
    router: FakeRouter,
    meanwhile: Callable[[Callable[[], Any]], Future[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuse() -> None:
        router.receive()
        router.send(Refusal("enough"))

    def ask_first(context: Any, address: str, settings: Any, hello: Hello, *others: Any) -> RouterLink:
        asked.append(health_of(hello.http_address))
        return RouterLink(context, address, settings, hello, *others)

    monkeypatch.setattr(process, "RouterLink", ask_first)
    meanwhile(refuse)
    with pytest.raises(Refused, match="enough"):
        serve(router)
    assert asked == [503]
    assert closed == ["ends", "device", "pool"]


def test_a_node_that_cannot_start_closes_what_it_has_opened(closed: list[str], router: FakeRouter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidSetting, match="--http-port"):
        serve(router, http_port=taken.getsockname()[1])
    assert closed == ["ends", "device", "pool"]


@pytest.mark.parametrize(("given", "problem"), [
    ("127.0.0.1:1,", "not an address"), ("h:1, tcp://h:1", "twice"), (",".join(f"h:{i}" for i in range(1, 18)), "17 "),
])  # fmt: skip
def test_routers_that_cannot_be_meant_are_refused(given: str, problem: str) -> None:
    with pytest.raises(InvalidSetting, match=f"--router.*{problem}"):
        _ = NodeSettings(router=given).router_addresses


def test_a_node_may_be_given_several_routers() -> None:
    assert NodeSettings(router="h:1, tcp://g:2").router_addresses == ("tcp://h:1", "tcp://g:2")
