"""What the router adds to a token's way: a fake node's tokens through a real router, in turns with the bare way.

Owns the router's process, both ways on which tokens come here, their stamps (seconds of CLOCK_MONOTONIC), the order of
the rounds and the figures. One fake node makes the same messages at the same cadence for both ways. No process is
pinned, as where `baton serve` starts the router. A stamp is taken when bytes are there, before anybody looks at them.

Of a token: from the moment its step was handed to the fake node's link until its bytes are here; of the first token of
a request: from the sending of the request on.

How many events the router sends per second of its own CPU is measured with a node that has everything ready. A client
still gets one event for each token, but several of them in one write. How much of a core the router uses at a given
rate is measured at that rate.
"""

from __future__ import annotations

import json
import re
import secrets
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from urllib.parse import urlsplit

import zmq

from baton.bench.child import Child as Commanded
from baton.bench.limits.result import Ratio, difference_of, range_of
from baton.bench.numbers import median, percentile
from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.engine.models.config import load_config
from baton.engine.models.identity import model_fingerprint
from baton.engine.text.tokenizer import Tokenizer
from baton.runtime.child import PIPE, Child
from baton.wire.errors import RequestFailed
from baton.wire.links import LinkSettings, bind, open_socket
from baton.wire.messages import NODE_TO_ROUTER, ROUTER_TO_NODE, Decode, Hello, Ping, Tokens, Welcome, control_identity
from baton.wire.sampling import DecodingParams

_FAKE_NODE = "baton.bench.limits.fake_node_process"
_ROUTER_FLAGS = ("--port=0", "--control-port=0", "--shutdown-timeout-s=1", "--log-level=warning")
_ROUTER, _DIRECT = "router", "direct"
_SESSION = 1
_READY_S, _WAIT_S = 30.0, 20.0
_READ_BYTES = 2**16
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """What is measured: so many requests at once, each of `num_tokens`, one step every `interval_s`."""

    concurrencies: tuple[int, ...] = (1, 16, 64)
    num_rounds: int = 7
    num_tokens: int = 200
    interval_s: float = 0.01
    num_prompt_tokens: int = 128


@dataclass(frozen=True, slots=True)
class RatePlan:
    """What is measured: so many requests at once that have about `num_events` tokens together, which the node has all
    ready, or sends at `events_per_s`."""

    concurrencies: tuple[int, ...] = (64, 256)
    num_rounds: int = 7
    num_events: int = 64_000
    events_per_s: int = 20_000
    num_prompt_tokens: int = 128
    limit_s: float = 120.0


@dataclass(slots=True)
class Received:
    """One request: when it was sent, and when each of its tokens came."""

    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Way:
    """Microseconds, one list per round: of every token but the first, and of every first token."""

    token_us: list[list[float]] = field(default_factory=list)
    first_us: list[list[float]] = field(default_factory=list)

    def add(self, received: Sequence[Received], stamps_s: list[float]) -> None:
        """Note a round. `stamps_s`: when each step after the first token was made."""
        self.first_us.append([(each.token_s[0] - each.sent_s) * 1e6 for each in received])
        steps = [zip(each.token_s[1:], stamps_s, strict=True) for each in received]
        self.token_us.append([(came_s - made_s) * 1e6 for step in steps for came_s, made_s in step])


@dataclass(frozen=True, slots=True)
class RouterSamples:
    """At one concurrency: both ways, and seconds of CPU that the router used in each round."""

    concurrency: int
    num_tokens: int
    routed: Way = field(default_factory=Way)
    direct: Way = field(default_factory=Way)
    cpu_s: list[float] = field(default_factory=list)


def measure_router_hop(plan: RouterPlan, say: Callable[[str], None]) -> list[RouterSamples]:
    """Measure in turns, the bare way first. Raises `RequestFailed`, `ChildFailed`."""
    found, limit_s = [], plan.num_tokens * plan.interval_s + _WAIT_S
    with running_router() as hop, DirectEnd() as direct:
        node = hop.node
        node.tell("join", end=_DIRECT, address=direct.address)
        direct.welcome()
        node.hear()
        for concurrency in plan.concurrencies:
            say(f"router, {concurrency} requests at once")
            prompts = hop.prompts(concurrency, plan.num_prompt_tokens)
            load = {"count": concurrency, "num_tokens": plan.num_tokens, "interval_s": plan.interval_s}
            warm_up, into = (RouterSamples(concurrency, plan.num_tokens) for _ in range(2))
            for samples in (warm_up, *[into] * plan.num_rounds):
                node.tell("emit", end=_DIRECT, **load)
                received = direct.receive(prompts, plan.num_tokens, limit_s)
                samples.direct.add(received, node.hear())
                received, cpu_s, stamps_s = hop.relay(prompts, plan.num_tokens, plan.interval_s, limit_s)
                samples.cpu_s.append(cpu_s)
                samples.routed.add(received, stamps_s)
            found.append(into)
    return found


def measure_router_rate(plan: RatePlan, say: Callable[[str], None]) -> list[Ratio]:
    """`router_events_per_cpu_s` and `router_core_share` at each concurrency. Raises `RequestFailed`, `ChildFailed`."""
    found = []
    with running_router() as hop:
        for concurrency in plan.concurrencies:
            say(f"router, events of {concurrency} requests")
            prompts, num_tokens = hop.prompts(concurrency, plan.num_prompt_tokens), plan.num_events // concurrency
            rates, shares, paced = [], [], Way()
            for _ in range(plan.num_rounds):
                _, cpu_s, _ = hop.relay(prompts, num_tokens, 0.0, plan.limit_s)
                rates.append(concurrency * num_tokens / cpu_s)
                received, cpu_s, stamps_s = hop.relay(
                    prompts, num_tokens, concurrency / plan.events_per_s, plan.limit_s
                )
                shares.append(cpu_s / (max(each.token_s[-1] for each in received) - received[0].sent_s))
                paced.add(received, stamps_s)
            late_ms = median([percentile(of_round, 99) for of_round in paced.token_us]) / 1000
            case, note = f"concurrency {concurrency}", "requests included; what clients and node use is not"
            found.append(range_of("router_events_per_cpu_s", case, rates, "1/s", f"{plan.events_per_s}", note))
            case, note = f"{case}, {plan.events_per_s} events/s", f"p99 of a token's way {late_ms:.0f} ms"
            found.append(range_of("router_core_share", case, shares, "", "1", note))
    return found


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A router with the demo model's tokenizer, and the fake node that it has taken in."""

    pid: int
    base_url: str
    node: Commanded
    token_id: int

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        return [[self.token_id] * num_tokens] * count

    def relay(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, interval_s: float, limit_s: float
    ) -> tuple[list[Received], float, list[float]]:
        """Have all prompts answered; what came, the seconds of CPU that the router used, and when each step after the
        first token was made. Raises `RequestFailed`."""
        self.node.tell("emit", end=_ROUTER, count=len(prompts), num_tokens=num_tokens, interval_s=interval_s)
        before_s = self._cpu_s()
        received = receive_streams(self.base_url, DEMO_MODEL_NAME, prompts, num_tokens, limit_s)
        return received, self._cpu_s() - before_s, self.node.hear()

    def _cpu_s(self) -> float:
        """Seconds of CPU that all threads of the router have used so far."""
        # clock_getcpuclockid(3), which Python does not have: nanoseconds, where /proc has hundredths of a second
        return time.clock_gettime((~self.pid << 3) | _CPUCLOCK_SCHED)


@contextmanager
def running_router() -> Iterator[RunningRouter]:
    """Raises `RequestFailed`, `ChildFailed`."""
    token_id = Tokenizer.from_folder(checkpoint_path()).encode(" word")[-1]
    fingerprint = model_fingerprint(checkpoint_path(), load_config(checkpoint_path()))
    with (
        Commanded(_FAKE_NODE, {"fingerprint": fingerprint, "token_id": token_id}) as node,
        Child("router", *_ROUTER_FLAGS, stdout=PIPE) as router,
    ):
        ready = router.wait_ready(_READY_S)
        node.hear()
        node.ask("join", end=_ROUTER, address=ready.control_address)
        yield RunningRouter(router.pid, ready.address, node, token_id)


def router_ratios(samples: RouterSamples) -> list[Ratio]:
    """`router_us_per_token`, `router_ttft_us` and `router_cpu_s_per_1000_tokens` at one concurrency."""
    ratios = []
    for name, routed, direct in (
        ("router_us_per_token", samples.routed.token_us, samples.direct.token_us),
        ("router_ttft_us", samples.routed.first_us, samples.direct.first_us),
    ):
        for percent in (50, 99):
            routed_us, direct_us = ([percentile(of_round, percent) for of_round in way] for way in (routed, direct))
            case = f"concurrency {samples.concurrency}, p{percent}"
            note = f"{median(routed_us):.0f} us through the router, {median(direct_us):.0f} us without"
            ratios.append(difference_of(name, case, routed_us, direct_us, unit="us", note=note))
    cpu_s = [taken_s / (samples.concurrency * samples.num_tokens / 1000) for taken_s in samples.cpu_s]
    note = "all that the router's process used, requests and idle time included"
    case = f"concurrency {samples.concurrency}"
    return [*ratios, range_of("router_cpu_s_per_1000_tokens", case, cpu_s, "s", "0", note)]


def receive_streams(
    base_url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    limit_s: float,
    when_read: Callable[[], None] = lambda: None,
) -> list[Received]:
    """Send all prompts at once and read their streams to the end, `limit_s` at most. `when_read` is called each time
    that what has come was read.

    No client for anything else: it knows that every event of a stream is one token. Raises `RequestFailed` when an
    answer is an error, or not one event for each of `num_tokens` tokens.
    """
    address = urlsplit(base_url)
    deadline_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        sent_s, streams = [], []
        for _ in prompts:
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), _WAIT_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pieces: list[tuple[float, bytes]] = []
            selector.register(connection, selectors.EVENT_READ, pieces)
            streams.append((connection, pieces))
        for prompt, (connection, _) in zip(prompts, streams, strict=True):
            request = _request(address.netloc, model, prompt, num_tokens)
            sent_s.append(time.monotonic())
            connection.sendall(request)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RequestFailed(f"{base_url}: a stream did not end in time")
            for key, _ in ready:
                piece = key.fileobj.recv(_READ_BYTES)  # type: ignore[union-attr]
                key.data.append((time.monotonic(), piece))
                if not piece:
                    selector.unregister(key.fileobj)
            when_read()
    return [Received(at_s, _stamps(pieces, num_tokens)) for at_s, (_, pieces) in zip(sent_s, streams, strict=True)]


def _request(netloc: str, model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    members = {"model": model, "prompt": list(prompt), "max_tokens": num_tokens}
    body = json.dumps({**members, "ignore_eos": True, "temperature": 0.0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {netloc}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _stamps(pieces: list[tuple[float, bytes]], num_tokens: int) -> list[float]:
    """When the end of each token's event came, of a whole answer. Raises `RequestFailed`."""
    answer = b"".join(piece for _, piece in pieces)
    status = answer[9:12].decode(errors="replace")
    if status != "200":
        raise RequestFailed(f"the router answered {status}: {answer[-300:].decode(errors='replace')}")
    reached = list(accumulate(len(piece) for _, piece in pieces))
    # a blank line ends an event; nothing else in a response has two line feeds in a row
    found = [pieces[bisect_left(reached, event.end())][0] for event in re.finditer(b"\n\n", answer)]
    if len(found) != num_tokens + 1:  # [DONE] is an event too
        raise RequestFailed(f"a stream ended after {len(found)} of {num_tokens} tokens")
    return found[:-1]


class DirectEnd:
    """The other end of a fake node's link: a socket of the router's kind with nothing behind it. Context manager."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = open_socket(self._context, zmq.ROUTER, LinkSettings())
        self.address = bind(self._link, "127.0.0.1", 0, LinkSettings())
        self._identity = b""

    def __enter__(self) -> DirectEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def welcome(self) -> None:
        """Take the node in when it says Hello. Raises `RequestFailed`."""
        while not self._identity:
            _, message = self._next(time.monotonic() + _WAIT_S)
            if isinstance(message, Hello):
                self._identity = control_identity(message.epoch)
                self._send(Welcome(_SESSION))

    def receive(self, prompts: Sequence[Sequence[int]], num_tokens: int, limit_s: float) -> list[Received]:
        """As `receive_streams`, without a router."""
        self._send(Ping(_SESSION, _SESSION, _SESSION))  # as a router does
        received: dict[bytes, Received] = {}
        params = DecodingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for prompt in prompts:
            handoff_id = secrets.token_bytes(16)
            leg = Decode(handoff_id, 1, tuple(prompt), len(prompt), params, cache_salt=b"", prefill_peer=None)
            received[handoff_id] = Received(time.monotonic())
            self._send(leg)
        deadline_s = time.monotonic() + limit_s
        while min(len(each.token_s) for each in received.values()) < num_tokens:
            came_s, message = self._next(deadline_s)
            for event in message.events if isinstance(message, Tokens) else ():
                received[event.handoff_id].token_s.append(came_s)
        return list(received.values())

    def _next(self, deadline_s: float) -> tuple[float, object]:
        """When the next message came, before it was looked at, and the message. Raises `RequestFailed`."""
        if not self._link.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            raise RequestFailed("the fake node went silent")
        frame = self._link.recv_multipart()[-1]
        return time.monotonic(), NODE_TO_ROUTER.decode(frame)

    def _send(self, message: object) -> None:
        self._link.send_multipart([self._identity, ROUTER_TO_NODE.encode(message)])
