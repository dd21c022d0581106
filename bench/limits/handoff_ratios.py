"""`exposed_ratio` and `handover_us`: what is left of the handoff in a running system, by the stamps of its nodes.

Owns the requests and the figures. A real `baton serve` with one prefill and one decode node is asked one request after
the other, in turns with a copy of memory by another process. All stamps are of one CLOCK_MONOTONIC.

`exposed_ratio`: from the moment the prefill node has drawn token 1 until the KV is verified at the decode node, over
the time that a copy of as many bytes takes at the rate of the round's copy. `handover_us`: from drawing token 1 until
the client has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.child import Child
from bench.client.asking import TIMEOUT_S, Prompts, ask, client_runner
from bench.client.endpoint import probe
from bench.client.outcome import Outcome
from bench.limits.ceilings import buffer_bytes
from bench.limits.result import Ratio, ratio_of
from bench.limits.served import baton_target, served_model
from bench.stats import median, percentile
from bench.targets.process import RunningTarget
from program.clock import host_clock
from wire.errors import RequestFailed

_COPIER = "bench.kv.limits_process"
NUM_OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """So many requests for each length of prompt, after one that warms up."""

    model: str
    prompt_lens: tuple[int, ...]
    num_rounds: int
    ready_timeout_s: float
    seed: int = 0
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class HandoffSamples:
    """One length of prompt, in microseconds: what a copy of the bytes takes, and what the handoff left to be seen."""

    num_prompt_tokens: int
    num_bytes: int
    num_layers: int
    copy_us: list[float] = field(default_factory=list)
    exposed_us: list[float] = field(default_factory=list)
    handover_us: list[float] = field(default_factory=list)


def measure_handoffs(
    plan: HandoffPlan, cores: tuple[int, int] | None, say: Callable[[str], None]
) -> list[HandoffSamples]:
    """Start Baton, ask, end it. Raises `RequestFailed` when a request fails or came without a handoff."""
    model = served_model(plan.model)
    prompts = Prompts(model.vocab_size, plan.seed)
    num_buffer_bytes = buffer_bytes(is_quick=plan.is_quick)
    with ExitStack() as stack:
        copier = stack.enter_context(Child(_COPIER, {"num_bytes": num_buffer_bytes}, cores[0] if cores else None))
        running = stack.enter_context(RunningTarget(baton_target("pd", plan.model), plan.ready_timeout_s, say))
        runner = stack.enter_context(client_runner())
        copier.hear()
        endpoint = runner.run(probe(running.url, "completions", "", TIMEOUT_S))
        found = []
        for num_tokens in plan.prompt_lens:
            say(f"handoffs of {num_tokens} tokens")
            runner.run(ask(endpoint, prompts.conversation(num_tokens, NUM_OUTPUT_TOKENS)))
            samples: HandoffSamples | None = None
            for _ in range(plan.num_rounds):
                copy_s_per_byte = float(copier.ask("copy")) / num_buffer_bytes
                outcome = runner.run(ask(endpoint, prompts.conversation(num_tokens, NUM_OUTPUT_TOKENS)))
                samples = samples or HandoffSamples(num_tokens, _num_bytes(outcome), model.num_layers)
                add_request(samples, outcome, copy_s_per_byte)
            if samples is not None:
                found.append(samples)
    return found


def add_request(samples: HandoffSamples, outcome: Outcome, copy_s_per_byte: float) -> None:
    """Note one request. Raises `RequestFailed` when its stamps cannot be used."""
    timings = outcome.timings
    sampled_us, ready_us = timings.get("first_sampled_us"), timings.get("kv_ready_us")
    if not isinstance(sampled_us, int) or not isinstance(ready_us, int) or timings.get("clock") != host_clock():
        raise RequestFailed("an answer came without the stamps of a handoff on this host's clock")
    samples.copy_us.append(_num_bytes(outcome) * copy_s_per_byte * 1e6)
    samples.exposed_us.append(max(0.0, ready_us - sampled_us))
    samples.handover_us.append(outcome.chunk_s[0] * 1e6 - sampled_us)


def handoff_ratios(samples: HandoffSamples) -> list[Ratio]:
    """Both figures of one length of prompt."""
    case = f"prompt of {samples.num_prompt_tokens} tokens"
    exposed_us, copy_us = median(samples.exposed_us), median(samples.copy_us)
    return [
        ratio_of(
            "exposed_ratio",
            case,
            samples.exposed_us,
            samples.copy_us,
            goal=f"{1 / samples.num_layers:.3g} (one layer of {samples.num_layers})",
            note=f"{samples.num_bytes / 2**20:.1f} MiB: {exposed_us:.0f} us exposed, a copy takes {copy_us:.0f} us",
        ),
        Ratio(
            name="handover_us",
            case=case,
            value=median(samples.handover_us),
            low=min(samples.handover_us),
            high=max(samples.handover_us),
            unit="us",
            goal="the router's way",
            note=f"p99 {percentile(samples.handover_us, 99):.0f} us, one request at a time",
        ),
    ]


def _num_bytes(outcome: Outcome) -> int:
    transfer = outcome.usage.get("kv_transfer")
    if not isinstance(transfer, dict):
        raise RequestFailed("an answer came without a handoff: is its prompt too short for one?")
    return int(transfer["bytes"])
