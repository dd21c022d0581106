"""What the router adds to a token's way: an emitter's tokens through a real router, in turns with the bare way.

Owns the order of the rounds and the figures. One emitter process makes the same messages at the same cadence for both
ways; they end in this process, see `bench.limits.receivers`. None of the processes is pinned: the router is not either
where `baton serve` starts it.

Of a token: from the moment its step was handed to the emitter's link until its bytes are here. The first token of a
request is not among them: for it the request's own way counts too, from its sending on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.child import Child
from bench.limits.difference import difference_of
from bench.limits.receivers import DirectReceiver, Received, receive_streams
from bench.limits.result import Ratio
from bench.limits.router_process import RouterProcess
from bench.stats import median, percentile
from demo.location import DEMO_MODEL_NAME, checkpoint_path
from engine.models.config import load_config
from engine.models.identity import model_fingerprint
from engine.text.tokenizer import Tokenizer

_EMITTER = "bench.limits.emitter_process"
_ROUTER, _DIRECT = "router", "direct"
_WORD = " word"
_PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """What is measured: so many requests at once, each of `num_tokens`, one step every `interval_s`."""

    concurrencies: tuple[int, ...] = (1, 16, 64)
    num_rounds: int = 7
    num_tokens: int = 200
    interval_s: float = 0.01
    num_prompt_tokens: int = 128

    @property
    def duration_s(self) -> float:
        """What one round takes at least."""
        return self.num_tokens * self.interval_s


@dataclass(frozen=True, slots=True)
class Way:
    """Microseconds, one list per round: of every token but the first, and of every first token."""

    token_us: list[list[float]] = field(default_factory=list)
    first_us: list[list[float]] = field(default_factory=list)

    def add(self, received: list[Received], stamps_s: list[float]) -> None:
        """Note a round. `stamps_s`: when each step after the first token was made."""
        self.first_us.append([(each.token_s[0] - each.sent_s) * 1e6 for each in received])
        self.token_us.append(
            [
                (came_s - made_s) * 1e6
                for each in received
                for came_s, made_s in zip(each.token_s[1:], stamps_s, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class RouterSamples:
    """At one concurrency: both ways, and seconds of CPU that the router used in each round."""

    concurrency: int
    num_tokens: int
    routed: Way = field(default_factory=Way)
    direct: Way = field(default_factory=Way)
    cpu_s: list[float] = field(default_factory=list)


def measure_router_path(plan: RouterPlan, say: Callable[[str], None]) -> list[RouterSamples]:
    """Measure in turns. Raises `RequestFailed`."""
    tokenizer = Tokenizer.from_folder(checkpoint_path())
    fingerprint = model_fingerprint(checkpoint_path(), load_config(checkpoint_path()))
    found = []
    with ExitStack() as stack:
        token_id = tokenizer.encode(_WORD)[-1]
        emitter = stack.enter_context(Child(_EMITTER, {"fingerprint": fingerprint, "token_id": token_id}))
        router = stack.enter_context(RouterProcess())
        direct = stack.enter_context(DirectReceiver())
        emitter.hear()
        emitter.ask("join", end=_ROUTER, address=router.control_address)
        emitter.tell("join", end=_DIRECT, address=direct.address)
        direct.welcome()
        emitter.hear()
        for concurrency in plan.concurrencies:
            say(f"router, {concurrency} requests at once")
            rounds = _Rounds(plan, emitter, router, direct, concurrency, token_id)
            rounds.run(RouterSamples(concurrency, plan.num_tokens))  # warm-up
            samples = RouterSamples(concurrency, plan.num_tokens)
            for _ in range(plan.num_rounds):
                rounds.run(samples)
            found.append(samples)
    return found


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Everything that one round needs."""

    plan: RouterPlan
    emitter: Child
    router: RouterProcess
    direct: DirectReceiver
    concurrency: int
    token_id: int

    def run(self, samples: RouterSamples) -> None:
        """The bare way, then through the router."""
        plan = self.plan
        prompts = [[self.token_id] * plan.num_prompt_tokens for _ in range(self.concurrency)]
        self._start(_DIRECT)
        received = self.direct.receive(prompts, plan.num_tokens, plan.duration_s)
        samples.direct.add(received, self.emitter.hear())
        self._start(_ROUTER)
        before_s = self.router.cpu_s()
        received = receive_streams(self.router.url, DEMO_MODEL_NAME, prompts, plan.num_tokens, plan.duration_s)
        samples.cpu_s.append(self.router.cpu_s() - before_s)
        samples.routed.add(received, self.emitter.hear())

    def _start(self, end: str) -> None:
        plan = self.plan
        self.emitter.tell(
            "emit", end=end, count=self.concurrency, num_tokens=plan.num_tokens, interval_s=plan.interval_s
        )


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
    ratios.append(
        Ratio(
            name="router_cpu_s_per_1000_tokens",
            case=f"concurrency {samples.concurrency}",
            value=median(cpu_s),
            low=min(cpu_s),
            high=max(cpu_s),
            unit="s",
            goal="0",
            note="all that the router's process used, requests and idle time included",
        )
    )
    return ratios
