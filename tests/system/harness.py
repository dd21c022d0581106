"""A whole relay of real processes on loopback: a router, prefill nodes and decode nodes.

Owns the processes, what they left behind and every wait for them; each wait has a deadline. Knows nothing of what is
being tested. All processes die with the test process, whatever ends it.

`settle` is the standing claim of every test: when nothing is in flight, every block is free or cached again. `stop` is
the standing claim of every relay: SIGTERM ends each program with status 0, and no process, shared-memory segment or
listening port is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.system.prepared import NODE_MODULES, ROUTER_MODULES, PreparedProcess, die_with_parent, prepared_python

ROOT = Path(__file__).resolve().parents[2]
MODEL_NAME = "tiny"
BLOCK_SIZE = 16
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 60.0
_SHM = Path("/dev/shm")
_SEGMENT = re.compile(r"/dev/shm/(baton-[0-9a-f]+)")
_POLL_S = 0.05


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 10.0) -> None:
    """Return once `condition()` holds; fail with `what` when it does not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {timeout_s:g} s still not: {what if isinstance(what, str) else what()}")
        time.sleep(_POLL_S)


class Metrics:
    """One scrape of `/metrics`: `value(name, label=...)` is the sum over matching samples."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> int:
        """Raises `KeyError` when there is no such metric."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"baton:{name}" and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(f"baton:{name} {labels}")
        return round(sum(found))


Process: TypeAlias = subprocess.Popen[bytes] | PreparedProcess
Starter: TypeAlias = Callable[[Sequence[str], Mapping[str, str], IO[bytes], IO[bytes]], Process]
"""Starts `python *command` with this environment, stdout and stderr. Call it on the main thread: the kernel ties the
process to that thread."""


def started(command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    """Start it as users do. A `Starter`."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        cwd=ROOT,
        env=environment,
        preexec_fn=die_with_parent,
    )


def forked(command: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    """Fork it from a process that has imported what nodes and routers import. A `Starter`."""
    return prepared_python(*NODE_MODULES, *ROUTER_MODULES).start(command, environment, out, err)


def forked_with(*modules: str) -> Starter:
    """Forks from a process that has imported these, too."""
    return prepared_python(*NODE_MODULES, *ROUTER_MODULES, *modules).start


class Program:
    """One process, `python *command`, that prints a "ready" line."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, start: Starter = started) -> None:
        self.name = name
        self.ready: dict[str, str] = {}
        self.ports: set[int] = set()
        self.segments: set[str] = set()
        self._out = folder / f"{name}.out"
        self._err = folder / f"{name}.err"
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = start(command, environment, out, err)

    @property
    def address(self) -> str:
        """Of the HTTP port."""
        return self.ready["address"]

    @property
    def out(self) -> str:
        """Everything it wrote to stdout."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Everything it wrote to stderr."""
        return self._err.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait for the ready line, then note what this process holds."""
        wait_until(self._has_said_ready, lambda: f"{self.name} ready:\n{self.err[-4000:]}", START_TIMEOUT_S)
        self.ports, self.segments = listening_ports(self.process.pid), own_segments(self.process.pid)

    def metrics(self) -> Metrics:
        """A fresh scrape."""
        return Metrics(self.address)

    def signal(self, number: int) -> None:
        """Send a signal, by process id."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not exit in {timeout_s:g} s:\n{self.err[-4000:]}") from None

    def stop(self) -> None:
        """SIGTERM; fails unless it exits with 0 and leaves nothing."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.signal(signal.SIGTERM)
        status = self.wait_exit()
        assert status == 0, f"{self.name} exited with {status}:\n{self.err[-4000:]}"
        self.require_nothing_left(children)

    def require_nothing_left(self, children: Iterable[psutil.Process] = ()) -> None:
        """Fails when a child, a segment or a listening port has outlived the process."""
        left = [f"process {child.pid}" for child in children if child.is_running()]
        left += [f"segment {name}" for name in self.segments if (_SHM / name).exists() and not _is_mapped(name)]
        left += [f"port {port}" for port in self.ports if _is_listening(port)]
        assert not left, f"{self.name} left {', '.join(left)}"

    def _has_said_ready(self) -> bool:
        for line in self.out.splitlines():
            if line.startswith("{") and line.endswith("}") and (event := json.loads(line)).get("event") == "ready":
                self.ready = event
                return True
        assert self.is_running, f"{self.name} exited with {self.process.returncode}:\n{self.err[-4000:]}"
        return False


class Node(Program):
    """A prefill or decode node."""

    def __init__(self, role: str, name: str, command: Sequence[str], folder: Path, start: Starter = forked) -> None:
        super().__init__(name, command, folder, start)
        self.role = role
        self.num_blocks = 0

    def wait_ready(self) -> None:
        """Also notes the size of the pool."""
        super().wait_ready()
        self.num_blocks = self.metrics().value("kv_blocks")

    def unsettled(self) -> str:
        """What is not as it is without requests; "" if all is well."""
        metrics = self.metrics()
        names = ["num_requests_running", "num_requests_waiting"]
        names += ["kv_quarantined_blocks"] if self.role == "decode" else []
        counts = {name: metrics.value(name) for name in names}
        counts["held"] = metrics.value("kv_blocks", state="held")
        num_idle = metrics.value("kv_blocks", state="free") + metrics.value("kv_blocks", state="cached")
        counts["lost"] = self.num_blocks - num_idle - counts["held"]
        wrong = {name: count for name, count in counts.items() if count}
        return f"{self.name}: {wrong}" if wrong else ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice as its client saw it. `logprobs` is empty when none were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str | None


@dataclass(slots=True)
class Relay:
    """A router and its nodes. `restart_router` and `add` may be used at any time."""

    model: Path
    folder: Path
    router_flags: tuple[str, ...] = ()
    router_script: tuple[str, ...] = ("-m", "baton.router")
    nodes: list[Node] = field(default_factory=list)
    num_started: int = 0
    _router: Program | None = None
    _client: openai.OpenAI | None = None

    @property
    def router(self) -> Program:
        """The running router."""
        assert self._router is not None
        return self._router

    @property
    def prefills(self) -> list[Node]:
        """Running prefill nodes, in order of their start."""
        return [node for node in self.nodes if node.role == "prefill"]

    @property
    def decodes(self) -> list[Node]:
        """Running decode nodes, in order of their start."""
        return [node for node in self.nodes if node.role == "decode"]

    @property
    def client(self) -> openai.OpenAI:
        """The official client, without retries."""
        if self._client is None:
            self._client = openai.OpenAI(
                base_url=f"{self.router.address}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
            )
        return self._client

    def start_router(self, *flags: str) -> None:
        """Start the router and wait for it."""
        self.num_started += 1
        command = [*self.router_script, str(self.model), "--served-model-name", MODEL_NAME]
        command += [*self.router_flags, *flags]
        self._router = Program(f"router-{self.num_started}", command, self.folder, forked)
        self._router.wait_ready()

    def restart_router(self) -> None:
        """A new router on the ports of the one that was killed."""
        http_port, control_port = (self.router.ready[name].rsplit(":", 1)[1] for name in ("address", "control_address"))
        self.start_router("--port", http_port, "--control-port", control_port)

    def launch(self, role: str, *flags: str, model: Path | None = None, script: Sequence[str] = ()) -> Node:
        """Start a node (of another checkpoint, or a script in its place) without waiting; it is not yet in `nodes`. It
        has no drafts unless `flags` say so."""
        self.num_started += 1
        program = list(script) or ["-m", f"baton.{role}_node"]
        name = f"{role}-{self.num_started}"
        command = [*program, str(model or self.model), "--router", self.router.ready["control_address"]]
        # unless a test asks for drafts: what was said before would be said again before anything can happen to it
        command += ["--num-threads", "1", "--node-id", name, "--speculative-config", "none"]
        return Node(role, name, [*command, *flags], self.folder)

    def join(self, *launched: Node) -> list[Node]:
        """Wait until launched nodes are ready; they are then part of the relay."""
        try:
            for node in launched:
                node.wait_ready()
        except BaseException:
            for node in launched:
                node.kill()
            raise
        self.nodes.extend(launched)
        return list(launched)

    def add(self, role: str, *flags: str, script: Sequence[str] = ()) -> Node:
        """Start one node and wait for it."""
        return self.join(self.launch(role, *flags, script=script))[0]

    def drop(self, node: Node) -> None:
        """Kill a node with SIGKILL and wait until the router has noticed."""
        node.kill()
        self.nodes.remove(node)
        self.wait_for_members()

    def wait_for_members(self) -> None:
        """Wait until the router counts exactly `nodes`."""

        def counted() -> bool:
            metrics = self.router.metrics()
            expected = {"prefill": len(self.prefills), "decode": len(self.decodes)}
            return all(metrics.value("nodes", role=role) == count for role, count in expected.items())

        wait_until(counted, "the router counts the nodes that are there")

    def request(self, prompt: Sequence[int] | str, max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `client.completions.create` for a greedy stream with token ids that ends by length."""
        extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
        return {
            "model": MODEL_NAME,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "extra_body": extra,
            **options,
        }

    @contextlib.contextmanager
    def open(self, prompt: Sequence[int] | str, max_tokens: int = 24, **options: Any) -> Iterator[Stream]:
        """A stream in progress; leaving the block hangs up."""
        with self.client.completions.create(**self.request(prompt, max_tokens, options)) as chunks:
            yield Stream(chunks)

    @contextlib.contextmanager
    def open_soon(self, prompt: Sequence[int], max_tokens: int = 24) -> Iterator[Future[Answer]]:
        """A completion on a thread of its own."""
        with ThreadPoolExecutor(1) as threads:
            yield threads.submit(self.ask, prompt, max_tokens)

    def ask(self, prompt: Sequence[int] | str, max_tokens: int = 24, **options: Any) -> Answer:
        """One completion, streamed to its end."""
        with self.open(prompt, max_tokens, **options) as stream:
            stream.read_all()
        return stream.answer()

    def ask_all(
        self, prompts: Sequence[Sequence[int]], num_in_flight: int, max_tokens: int = 24, **options: Any
    ) -> list[Answer]:
        """Completions of `prompts`, `num_in_flight` at a time, in the order of the prompts."""
        with ThreadPoolExecutor(num_in_flight) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, max_tokens, **dict(options)), prompts))

    def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until no node holds blocks or requests; fails with those that are held."""

        def unsettled() -> list[str]:
            found = [node.unsettled() for node in self.nodes]
            if num_in_flight := self.router.metrics().value("num_requests_running"):
                found.append(f"router: {num_in_flight} in flight")
            return [text for text in found if text]

        wait_until(lambda: not unsettled(), lambda: f"settled: {unsettled()}", timeout_s)
        metrics = self.router.metrics()
        assert not self.nodes or metrics.value("node_load") == 0, "the router still counts legs"

    def stop(self) -> None:
        """End every program in the order an operator would; fails when one does not end well or leaves something."""
        for node in list(self.nodes):
            self.nodes.remove(node)
            try:
                node.stop()
            finally:
                node.kill()
        try:
            self.router.stop()
        finally:
            self.close()

    def close(self) -> None:
        """Kill whatever is left."""
        for program in [*self.nodes, *([self._router] if self._router else [])]:
            program.kill()
        self.nodes.clear()
        if self._client is not None:
            self._client.close()


class Stream:
    """A completion while it is streamed."""

    def __init__(self, chunks: Any) -> None:
        self.arrivals_s: list[float] = []
        self._chunks = iter(chunks)
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._text = ""
        self._finish_reason: str | None = None

    def read(self, num_tokens: int) -> Sequence[int]:
        """Read until so many tokens have come in all; fails when the stream ends before."""
        while len(self._token_ids) < num_tokens:
            assert self._take(), f"the stream ended after {len(self._token_ids)} tokens"
        return tuple(self._token_ids)

    def read_all(self) -> None:
        """Read to the end."""
        while self._take():
            pass

    def answer(self) -> Answer:
        """What has come so far."""
        return Answer(tuple(self._token_ids), tuple(self._logprobs), self._text, self._finish_reason)

    def _take(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        for choice in chunk.choices:
            token_ids = (choice.model_extra or {}).get("token_ids", [])
            self._token_ids.extend(token_ids)
            self.arrivals_s.extend([time.monotonic()] * len(token_ids))
            self._text += choice.text
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.logprobs is not None:
                self._logprobs.extend(choice.logprobs.token_logprobs)
        return True


def start_relay(
    model: Path,
    folder: Path,
    *,
    prefill: Sequence[Sequence[str]] = ((),),
    decode: Sequence[Sequence[str]] = ((),),
    router: Sequence[str] = (),
    router_script: Sequence[str] = ("-m", "baton.router"),
) -> Relay:
    """A running relay with one node per entry of `prefill` and `decode`, which are their flags."""
    folder.mkdir(parents=True, exist_ok=True)
    relay = Relay(model, folder, tuple(router), tuple(router_script))
    try:
        relay.start_router("--port", "0", "--control-port", "0")
        launched = [relay.launch("prefill", *flags) for flags in prefill]
        launched += [relay.launch("decode", *flags) for flags in decode]
        relay.join(*launched)
    except BaseException:
        relay.close()
        raise
    return relay


def listening_ports(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def own_segments(pid: int) -> set[str]:
    """Names of the shared-memory segments that a process has mapped."""
    return set(_SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))


def _is_mapped(name: str) -> bool:
    """Whether a living process has the segment: prefill nodes have mapped those of decode nodes, too."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if name in own_segments(pid):
                return True
    return False


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
