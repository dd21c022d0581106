"""Real servers that a measurement starts for itself: what is left of a handoff, and what prompts do to a stream.

Owns the requests and the figures. All stamps are of one CLOCK_MONOTONIC.

`exposed_ratio`, `handover_us`: one prefill and one decode node are asked one request after the other, in turns with a
copy of memory by another process. The ratio: from the moment the prefill node has sampled token 1 until the KV is
verified at the decode node, over the time that a copy of as many bytes takes at the rate of the round's copy. The
handover: from sampling token 1 until the client has it.

`itl_isolation`: all of `ARRANGEMENTS` run all the time, on the same cores, and are measured in turns: one long stream
alone, then the same beside prompts that ask for a single token, at the rate that keeps a prefill node busy for half of
the time. The first gap of a stream is left out: it is the handoff's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from baton.bench.child import Child
from baton.bench.client.driver import (
    OPTIONS,
    TIMEOUT_S,
    LoadPlan,
    Prompts,
    ask,
    client_runner,
    require_answer,
    run_load,
)
from baton.bench.client.endpoint import Endpoint, probe
from baton.bench.client.outcome import Outcome
from baton.bench.limits.result import LimitsSettings, Ratio, range_of, ratio_of
from baton.bench.numbers import median, percentile
from baton.bench.targets.process import PATIENCE_S, RunningTarget
from baton.bench.targets.spec import Target
from baton.bench.workload.dataset_settings import Conversation
from baton.engine.models.config import load_config
from baton.engine.models.identity import find_checkpoint
from baton.runtime.clock import host_clock
from baton.wire.errors import RequestFailed

_COPIER = "baton.bench.kv.limits_process"
_READY_S = 300.0
_NUM_OUTPUT_TOKENS = 4
ARRANGEMENTS: Mapping[str, tuple[str, ...]] = {
    "1 prefill, 1 decode": (),
    "colocated": ("--prefill=0",),
    "colocated, chunks of 128": ("--prefill=0", "--max-num-batched-tokens=128"),
}
"""Ways to serve: flags of `baton serve` by name."""
_NUM_TRIAL_TOKENS, _NUM_TRIAL_PROMPTS, _MIN_PROMPTS = 48, 3, 3
_MIN_ROUNDS, _MAX_ROUNDS = 2, 5
_MAX_SLOWDOWN = 20
_BUSY_SHARE = 0.5
_BUDGET_S = 60.0
_PHASE_S, _QUICK_PHASE_S = 1.5, 0.1
_NUM_CONTEXT_TOKENS = 64


@contextmanager
def baton_served(
    runner: asyncio.Runner,
    model: str,
    *flags: str,
    say: Callable[[str], None] = lambda _: None,
    ready_s: float = _READY_S,
    patience_s: float = PATIENCE_S,
) -> Iterator[Endpoint]:
    """A Baton on a free port; `model` as `baton serve` takes it, "" for the demo model. Raises as `RunningTarget`."""
    target = Target("baton", "", ("baton", "serve", *filter(None, (model,)), *flags))
    with RunningTarget(target, ready_s, say, patience_s) as running:
        yield runner.run(probe(running.url, "completions", "", TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class HandoffSamples:
    """One length of prompt, in microseconds: what a copy of the bytes takes, and what the handoff left to be seen."""

    num_prompt_tokens: int
    num_bytes: int
    num_layers: int
    copy_us: list[float] = field(default_factory=list)
    exposed_us: list[float] = field(default_factory=list)
    handover_us: list[float] = field(default_factory=list)

    def add(self, outcome: Outcome, copy_s_per_byte: float) -> None:
        """Note one request. Raises `RequestFailed` when its stamps cannot be used."""
        timings = outcome.timings
        sampled_us, ready_us = timings.get("first_sampled_us"), timings.get("kv_ready_us")
        if not isinstance(sampled_us, int) or not isinstance(ready_us, int) or timings.get("clock") != host_clock():
            raise RequestFailed("an answer came without the stamps of a handoff on this host's clock")
        self.copy_us.append(_num_moved_bytes(outcome) * copy_s_per_byte * 1e6)
        self.exposed_us.append(max(0.0, ready_us - sampled_us))
        self.handover_us.append(outcome.chunk_s[0] * 1e6 - sampled_us)


def measure_handoffs(settings: LimitsSettings, core: int | None, say: Callable[[str], None]) -> list[HandoffSamples]:
    """Start Baton, ask, end it. Raises `RequestFailed` when a request fails or came without a handoff."""
    config = load_config(find_checkpoint(settings.model, weights=False))
    prompts, num_tokens = Prompts(config.vocab_size, 0), settings.num_prompt_tokens
    limit = config.max_context_len - _NUM_OUTPUT_TOKENS
    found = []
    with (
        Child(_COPIER, {"core": settings.buffer_bytes}, core) as copier,
        client_runner() as runner,
        baton_served(runner, settings.model, say=say) as endpoint,
    ):
        copier.hear()
        for length in sorted({min(num_tokens, limit), min((1 if settings.quick else 4) * num_tokens, limit)}):
            say(f"handoffs of {length} tokens")
            warm_up = runner.run(ask(endpoint, prompts.conversation(length, _NUM_OUTPUT_TOKENS)))
            samples = HandoffSamples(length, _num_moved_bytes(warm_up), config.num_layers)
            for _ in range(settings.num_rounds):
                copy_s_per_byte = float(copier.ask("copy")) / settings.buffer_bytes
                outcome = runner.run(ask(endpoint, prompts.conversation(length, _NUM_OUTPUT_TOKENS)))
                samples.add(outcome, copy_s_per_byte)
            found.append(samples)
    return found


def handoff_ratios(samples: HandoffSamples) -> list[Ratio]:
    case = f"prompt of {samples.num_prompt_tokens} tokens"
    exposed_us, copy_us = median(samples.exposed_us), median(samples.copy_us)
    goal = f"{1 / samples.num_layers:.3g} (one layer of {samples.num_layers})"
    note = f"{samples.num_bytes / 2**20:.1f} MiB: {exposed_us:.0f} us exposed, a copy takes {copy_us:.0f} us"
    p99 = f"p99 {percentile(samples.handover_us, 99):.0f} us, one request at a time"
    return [
        ratio_of("exposed_ratio", case, samples.exposed_us, samples.copy_us, goal=goal, note=note),
        range_of("handover_us", case, samples.handover_us, "us", "the router's way", p99),
    ]


def _num_moved_bytes(outcome: Outcome) -> int:
    """What the handoff of a request moved. Raises `RequestFailed` when there was none."""
    transfer = outcome.usage.get("kv_transfer")
    if not isinstance(transfer, dict):
        raise RequestFailed("an answer came without a handoff: is its prompt too short for one?")
    return int(transfer["bytes"])


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What is sent in a phase: a stream of so many tokens, and prompts at so many per second."""

    num_stream_tokens: int
    prompts_per_s: float


@dataclass(frozen=True, slots=True)
class IsolationSamples:
    """Of one arrangement, milliseconds by round; `ttft_ms` of all prompts that were answered beside a stream."""

    name: str
    num_prompt_tokens: int
    load: StreamLoad
    idle_p50_ms: list[float] = field(default_factory=list)
    loaded_p99_ms: list[float] = field(default_factory=list)
    loaded_max_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)


def measure_isolation(settings: LimitsSettings, say: Callable[[str], None]) -> list[IsolationSamples]:
    """Start every arrangement, measure in turns, end all. Raises `RequestFailed`.

    When `_BUDGET_S` is over no further round begins, but two there are.
    """
    config = load_config(find_checkpoint(settings.model, weights=False))
    num_tokens, phase_s = settings.num_prompt_tokens, _QUICK_PHASE_S if settings.quick else _PHASE_S
    phases = Phases(Prompts(config.vocab_size, 0), num_tokens, phase_s, config.max_context_len - _NUM_CONTEXT_TOKENS)
    with client_runner() as runner, ExitStack() as stack:
        servers = [baton_served(runner, settings.model, *flags, say=say) for flags in ARRANGEMENTS.values()]
        endpoints = [stack.enter_context(server) for server in servers]
        loads = [runner.run(phases.trial(endpoint)) for endpoint in endpoints]
        found = [IsolationSamples(name, num_tokens, loads[0]) for name in ARRANGEMENTS]
        deadline_s = time.monotonic() + _BUDGET_S
        for number in range(min(settings.num_rounds, _MAX_ROUNDS)):
            if number >= _MIN_ROUNDS and time.monotonic() > deadline_s:
                break
            say(f"isolation, round {number + 1}")
            for endpoint, samples in zip(endpoints, found, strict=True):
                runner.run(phases.round(endpoint, samples))
    return found


@dataclass(frozen=True, slots=True)
class Phases:
    """Sends one phase after the other: streams of about `phase_s`, longer where a few prompts need more time."""

    prompts: Prompts
    num_prompt_tokens: int
    phase_s: float
    max_stream_tokens: int

    async def trial(self, endpoint: Endpoint) -> StreamLoad:
        """Warm a server up, and find out which load fits it."""
        stream = await ask(endpoint, self._stream(_NUM_TRIAL_TOKENS))
        answered = [await ask(endpoint, self._prompt()) for _ in range(_NUM_TRIAL_PROMPTS)]
        ttft_s = min(outcome.chunk_s[0] - outcome.sent_s for outcome in answered)
        phase_s = max(self.phase_s, _MIN_PROMPTS * ttft_s / _BUSY_SHARE)
        num_stream_tokens = round(phase_s * 1e3 / median(gaps_ms(stream)))
        return StreamLoad(min(num_stream_tokens, self.max_stream_tokens), prompts_per_s=_BUSY_SHARE / ttft_s)

    async def round(self, endpoint: Endpoint, samples: IsolationSamples) -> None:
        """A stream alone, then one beside prompts. Raises `RequestFailed`."""
        num_tokens, prompts_per_s = samples.load.num_stream_tokens, samples.load.prompts_per_s
        samples.idle_p50_ms.append(median(gaps_ms(await ask(endpoint, self._stream(num_tokens)))))
        # more than can come in time: those that are still to come when the stream ends are called off
        num_prompts = 1 + round(_MAX_SLOWDOWN * max(prompts_per_s * self.phase_s, _MIN_PROMPTS))
        conversations = tuple(self._prompt() for _ in range(num_prompts))
        plan = LoadPlan(conversations, tuple(number / prompts_per_s for number in range(num_prompts)), None, TIMEOUT_S)
        answered: list[Outcome] = []
        prompts = asyncio.create_task(run_load([endpoint], plan, OPTIONS, answered.append), name="prompts")
        try:
            gaps = gaps_ms(await ask(endpoint, self._stream(num_tokens)))
        finally:
            prompts.cancel()
            await asyncio.gather(prompts, return_exceptions=True)
        for each in answered:
            require_answer(each)
        if not answered:
            raise RequestFailed(f"{samples.name}: no prompt was answered while a stream ran: make phases longer")
        samples.loaded_p99_ms.append(percentile(gaps, 99))
        samples.loaded_max_ms.append(max(gaps))
        samples.ttft_ms.extend((each.chunk_s[0] - each.sent_s) * 1e3 for each in answered)

    def _stream(self, num_tokens: int) -> Conversation:
        return self.prompts.conversation(_NUM_CONTEXT_TOKENS, num_tokens)

    def _prompt(self) -> Conversation:
        return self.prompts.conversation(self.num_prompt_tokens, 1)


def gaps_ms(outcome: Outcome) -> Sequence[float]:
    """Milliseconds between the tokens of a stream, from token 2 on. Raises `RequestFailed` when there are none."""
    found = [(later_s - earlier_s) * 1e3 for earlier_s, later_s in pairwise(outcome.chunk_s[1:])]
    if not found:
        raise RequestFailed("a stream came in fewer than three pieces: there are no gaps")
    return found


def isolation_ratio(samples: IsolationSamples) -> Ratio:
    note = (
        f"{samples.load.prompts_per_s:.2g} prompts/s of {samples.num_prompt_tokens} tokens: ITL p50 alone "
        f"{median(samples.idle_p50_ms):.2f} ms, p99 beside prompts {median(samples.loaded_p99_ms):.2f} ms, "
        f"longest {max(samples.loaded_max_ms):.1f} ms; TTFT of the prompts {median(samples.ttft_ms):.0f} ms"
    )
    return ratio_of("itl_isolation", samples.name, samples.loaded_p99_ms, samples.idle_p50_ms, goal="1", note=note)
