"""`itl_isolation`: what arriving prompts do to a stream that is being decoded, with prefill nodes and without.

Owns the load and the figures. Real servers on the same cores: one prefill and one decode node; decode nodes that
compute the prompts too, with the product's own chunks and with small ones. All run all the time and are measured in
turns: one long stream alone, then the same beside prompts that ask for a single token. The rate of the prompts is the
same for all: the one that keeps a prefill node busy for half of the time.

The first gap of a stream is left out: it is the handoff's, not the decoding's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from bench.client.asking import OPTIONS, TIMEOUT_S, Prompts, ask, client_runner, require_answer
from bench.client.driver import LoadPlan, run_load
from bench.client.endpoint import Endpoint, probe
from bench.client.outcome import Outcome
from bench.limits.result import Ratio, ratio_of
from bench.limits.served import baton_target
from bench.limits.settings import LimitsSettings
from bench.stats import median, percentile
from bench.targets.process import RunningTarget
from bench.workload.turns import Conversation
from engine.models.config import load_config
from engine.models.identity import find_checkpoint
from wire.errors import RequestFailed

_NUM_TRIAL_TOKENS = 48
_NUM_TRIAL_PROMPTS = 3
_MIN_PROMPTS = 3
_MIN_ROUNDS, _MAX_ROUNDS = 2, 5
_MAX_SLOWDOWN = 20
_BUSY_SHARE = 0.5
_BUDGET_S = 60.0
_READY_S = 300.0
_PHASE_S, _QUICK_PHASE_S = 1.5, 0.1
_NUM_CONTEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to serve: its name and the flags of `baton serve`."""

    name: str
    flags: tuple[str, ...]


ARRANGEMENTS = (
    Arrangement("1 prefill, 1 decode", ()),
    Arrangement("colocated", ("--prefill=0",)),
    Arrangement("colocated, chunks of 128", ("--prefill=0", "--max-num-batched-tokens=128")),
)


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


def measure_isolation(
    settings: LimitsSettings, say: Callable[[str], None], arrangements: Sequence[Arrangement] = ARRANGEMENTS
) -> list[IsolationSamples]:
    """Start every arrangement, measure in turns, end all. Raises `RequestFailed`.

    When `_BUDGET_S` is over no further round begins, but two there are.
    """
    config = load_config(find_checkpoint(settings.model, weights=False))
    prompts = Prompts(config.vocab_size, seed=0)
    with ExitStack() as stack:
        runner = stack.enter_context(client_runner())
        endpoints = []
        for number, arrangement in enumerate(arrangements):
            target = baton_target(f"isolation-{number}", settings.model, *arrangement.flags)
            running = stack.enter_context(RunningTarget(target, _READY_S, say))
            endpoints.append(runner.run(probe(running.url, "completions", "", TIMEOUT_S)))
        phase_s = _QUICK_PHASE_S if settings.quick else _PHASE_S
        phases = Phases(prompts, settings.num_prompt_tokens, phase_s, config.max_context_len - _NUM_CONTEXT_TOKENS)
        loads = [runner.run(phases.trial(endpoint)) for endpoint in endpoints]
        found = [IsolationSamples(each.name, settings.num_prompt_tokens, loads[0]) for each in arrangements]
        deadline_s = time.monotonic() + _BUDGET_S
        for number in range(min(settings.num_rounds, _MAX_ROUNDS)):
            if number >= _MIN_ROUNDS and time.monotonic() > deadline_s:
                break
            say(f"isolation, round {number + 1}")
            for endpoint, samples in zip(endpoints, found, strict=True):
                runner.run(phases.round(endpoint, samples))
    return found


class Phases:
    """Sends one phase after the other: streams of about `phase_s`, longer where a few prompts need more time."""

    def __init__(self, prompts: Prompts, num_prompt_tokens: int, phase_s: float, max_stream_tokens: int) -> None:
        self._prompts = prompts
        self._num_prompt_tokens = num_prompt_tokens
        self._phase_s = phase_s
        self._max_stream_tokens = max_stream_tokens

    async def trial(self, endpoint: Endpoint) -> StreamLoad:
        """Warm a server up, and find out which load fits it."""
        stream = await ask(endpoint, self._stream(_NUM_TRIAL_TOKENS))
        answered = [await ask(endpoint, self._prompt()) for _ in range(_NUM_TRIAL_PROMPTS)]
        ttft_s = min(outcome.chunk_s[0] - outcome.sent_s for outcome in answered)
        phase_s = max(self._phase_s, _MIN_PROMPTS * ttft_s / _BUSY_SHARE)
        num_stream_tokens = round(phase_s * 1e3 / median(gaps_ms(stream)))
        return StreamLoad(min(num_stream_tokens, self._max_stream_tokens), prompts_per_s=_BUSY_SHARE / ttft_s)

    async def round(self, endpoint: Endpoint, samples: IsolationSamples) -> None:
        """A stream alone, then one beside prompts. Raises `RequestFailed`."""
        num_tokens = samples.load.num_stream_tokens
        samples.idle_p50_ms.append(median(gaps_ms(await ask(endpoint, self._stream(num_tokens)))))
        outcome, answered = await self._ask_beside_prompts(endpoint, num_tokens, samples.load.prompts_per_s)
        if not answered:
            raise RequestFailed(f"{samples.name}: no prompt was answered while a stream ran: make phases longer")
        gaps = gaps_ms(outcome)
        samples.loaded_p99_ms.append(percentile(gaps, 99))
        samples.loaded_max_ms.append(max(gaps))
        samples.ttft_ms.extend((each.chunk_s[0] - each.sent_s) * 1e3 for each in answered)

    async def _ask_beside_prompts(
        self, endpoint: Endpoint, num_stream_tokens: int, prompts_per_s: float
    ) -> tuple[Outcome, list[Outcome]]:
        """The stream's outcome, and those of the prompts that were answered before it ended."""
        # more than can come in time: those that are still to come when the stream ends are called off
        num_prompts = 1 + round(_MAX_SLOWDOWN * max(prompts_per_s * self._phase_s, _MIN_PROMPTS))
        plan = LoadPlan(
            conversations=tuple(self._prompt() for _ in range(num_prompts)),
            arrivals_s=tuple(number / prompts_per_s for number in range(num_prompts)),
            max_concurrency=None,
            timeout_s=TIMEOUT_S,
        )
        answered: list[Outcome] = []
        prompts = asyncio.create_task(run_load([endpoint], plan, OPTIONS, answered.append), name="prompts")
        try:
            outcome = await ask(endpoint, self._stream(num_stream_tokens))
        finally:
            prompts.cancel()
            await asyncio.gather(prompts, return_exceptions=True)
        for each in answered:
            require_answer(each)
        return outcome, answered

    def _stream(self, num_tokens: int) -> Conversation:
        return self._prompts.conversation(_NUM_CONTEXT_TOKENS, num_tokens)

    def _prompt(self) -> Conversation:
        return self._prompts.conversation(self._num_prompt_tokens, 1)


def gaps_ms(outcome: Outcome) -> Sequence[float]:
    """Milliseconds between the tokens of a stream, from token 2 on. Raises `RequestFailed` when there are none."""
    found = [(later_s - earlier_s) * 1e3 for earlier_s, later_s in pairwise(outcome.chunk_s[1:])]
    if not found:
        raise RequestFailed("a stream came in fewer than three pieces: there are no gaps")
    return found


def isolation_ratio(samples: IsolationSamples) -> Ratio:
    """`itl_isolation` of one arrangement."""
    note = (
        f"{samples.load.prompts_per_s:.2g} prompts/s of {samples.num_prompt_tokens} tokens: ITL p50 alone "
        f"{median(samples.idle_p50_ms):.2f} ms, p99 beside prompts {median(samples.loaded_p99_ms):.2f} ms, "
        f"longest {max(samples.loaded_max_ms):.1f} ms; TTFT of the prompts {median(samples.ttft_ms):.0f} ms"
    )
    return ratio_of("itl_isolation", samples.name, samples.loaded_p99_ms, samples.idle_p50_ms, goal="1", note=note)
