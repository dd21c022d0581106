"""What the router adds to a token's way: a fake node's tokens through a real router, in turns with the bare way.

Owns the router's process, the order of the rounds and the figures. One fake node makes the same messages at the same
cadence for both ways; they end in this process, see `bench.limits.ways`. None of the processes is pinned: the router is
not either where `baton serve` starts it.

Of a token: from the moment its step was handed to the fake node's link until its bytes are here. The first token of a
request is not among them: for it the request's own way counts too, from its sending on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.child import Child as Commanded
from bench.limits.result import Ratio, difference_of, range_of
from bench.limits.ways import DirectEnd, Received, receive_streams
from bench.stats import median, percentile
from demo.location import DEMO_MODEL_NAME, checkpoint_path
from engine.models.config import load_config
from engine.models.identity import model_fingerprint
from engine.text.tokenizer import Tokenizer
from program.child import PIPE, Child

_FAKE_NODE = "bench.limits.fake_node_process"
_ROUTER_FLAGS = ("--port=0", "--control-port=0", "--shutdown-timeout-s=1", "--log-level=warning")
_ROUTER, _DIRECT = "router", "direct"
_PERCENTILES = (50, 99)
_READY_S, _LEAVE_S = 30.0, 5.0
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
class Way:
    """Microseconds, one list per round: of every token but the first, and of every first token."""

    token_us: list[list[float]] = field(default_factory=list)
    first_us: list[list[float]] = field(default_factory=list)

    def add(self, received: list[Received], stamps_s: list[float]) -> None:
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


class RouterProcess:
    """A router with the demo model's tokenizer, ready once it is made. Context manager. Raises `ChildFailed`."""

    def __init__(self) -> None:
        self._process = Child("router", *_ROUTER_FLAGS, stdout=PIPE)
        try:
            ready = self._process.wait_ready(_READY_S)
        except BaseException:
            self.close()
            raise
        self.url, self.control_address = ready.address, ready.control_address

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cpu_s(self) -> float:
        """Seconds of CPU that all its threads have used so far."""
        # clock_getcpuclockid(3), which Python does not have: nanoseconds, where /proc has hundredths of a second
        return time.clock_gettime((~self._process.pid << 3) | _CPUCLOCK_SCHED)

    def close(self) -> None:
        """End it."""
        self._process.end(_LEAVE_S)


def measure_router_hop(plan: RouterPlan, say: Callable[[str], None]) -> list[RouterSamples]:
    """Measure in turns. Raises `RequestFailed`, `ChildFailed`."""
    token_id = Tokenizer.from_folder(checkpoint_path()).encode(" word")[-1]
    fingerprint = model_fingerprint(checkpoint_path(), load_config(checkpoint_path()))
    found = []
    with ExitStack() as stack:
        node = stack.enter_context(Commanded(_FAKE_NODE, {"fingerprint": fingerprint, "token_id": token_id}))
        router = stack.enter_context(RouterProcess())
        direct = stack.enter_context(DirectEnd())
        node.hear()
        node.ask("join", end=_ROUTER, address=router.control_address)
        node.tell("join", end=_DIRECT, address=direct.address)
        direct.welcome()
        node.hear()
        for concurrency in plan.concurrencies:
            say(f"router, {concurrency} requests at once")
            prompts = [[token_id] * plan.num_prompt_tokens] * concurrency
            _round(plan, prompts, node, router, direct, RouterSamples(concurrency, plan.num_tokens))  # warm-up
            found.append(RouterSamples(concurrency, plan.num_tokens))
            for _ in range(plan.num_rounds):
                _round(plan, prompts, node, router, direct, found[-1])
    return found


def _round(
    plan: RouterPlan,
    prompts: list[list[int]],
    node: Commanded,
    router: RouterProcess,
    direct: DirectEnd,
    samples: RouterSamples,
) -> None:
    """The bare way, then through the router."""
    load = {"count": len(prompts), "num_tokens": plan.num_tokens, "interval_s": plan.interval_s}
    duration_s = plan.num_tokens * plan.interval_s
    node.tell("emit", end=_DIRECT, **load)
    received = direct.receive(prompts, plan.num_tokens, duration_s)
    samples.direct.add(received, node.hear())
    node.tell("emit", end=_ROUTER, **load)
    before_s = router.cpu_s()
    received = receive_streams(router.url, DEMO_MODEL_NAME, prompts, plan.num_tokens, duration_s)
    samples.cpu_s.append(router.cpu_s() - before_s)
    samples.routed.add(received, node.hear())


def router_ratios(samples: RouterSamples) -> list[Ratio]:
    """`router_us_per_token`, `router_ttft_us` and `router_cpu_s_per_1000_tokens` at one concurrency."""
    ratios = []
    for name, routed, direct in (
        ("router_us_per_token", samples.routed.token_us, samples.direct.token_us),
        ("router_ttft_us", samples.routed.first_us, samples.direct.first_us),
    ):
        for percent in _PERCENTILES:
            routed_us = [percentile(of_round, percent) for of_round in routed]
            direct_us = [percentile(of_round, percent) for of_round in direct]
            case = f"concurrency {samples.concurrency}, p{percent}"
            note = f"{median(routed_us):.0f} us through the router, {median(direct_us):.0f} us without"
            ratios.append(difference_of(name, case, routed_us, direct_us, unit="us", note=note))
    thousands = samples.concurrency * samples.num_tokens / 1000
    cpu_s = [taken_s / thousands for taken_s in samples.cpu_s]
    note = "all that the router's process used, requests and idle time included"
    case = f"concurrency {samples.concurrency}"
    return [*ratios, range_of("router_cpu_s_per_1000_tokens", case, cpu_s, "s", "0", note)]
