"""`exposed_ratio` and `handover_us`: what is left of the handoff in a running system, by the stamps of its nodes.

Owns the requests and the figures. A real `baton serve` with one prefill and one decode node is asked one request after
the other, in turns with a copy of memory by another process. All stamps are of one CLOCK_MONOTONIC.

`exposed_ratio`: from the moment the prefill node has sampled token 1 until the KV is verified at the decode node, over
the time that a copy of as many bytes takes at the rate of the round's copy. `handover_us`: from sampling token 1 until
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
from bench.limits.result import Ratio, range_of, ratio_of
from bench.limits.served import baton_target
from bench.limits.settings import LimitsSettings
from bench.stats import median, percentile
from bench.targets.process import RunningTarget
from engine.models.config import load_config
from engine.models.identity import find_checkpoint
from program.clock import host_clock
from wire.errors import RequestFailed

_COPIER = "bench.kv.limits_process"
_READY_S = 300.0
_NUM_OUTPUT_TOKENS = 4


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
        self.copy_us.append(num_moved_bytes(outcome) * copy_s_per_byte * 1e6)
        self.exposed_us.append(max(0.0, ready_us - sampled_us))
        self.handover_us.append(outcome.chunk_s[0] * 1e6 - sampled_us)


def measure_handoffs(settings: LimitsSettings, core: int | None, say: Callable[[str], None]) -> list[HandoffSamples]:
    """Start Baton, ask, end it. Raises `RequestFailed` when a request fails or came without a handoff."""
    config = load_config(find_checkpoint(settings.model, weights=False))
    prompts, num_tokens = Prompts(config.vocab_size, 0), settings.num_prompt_tokens
    limit = config.max_context_len - _NUM_OUTPUT_TOKENS
    lengths = {num_tokens} if settings.quick else {num_tokens, 4 * num_tokens}
    with ExitStack() as stack:
        copier = stack.enter_context(Child(_COPIER, {"num_bytes": settings.buffer_bytes}, core))
        running = stack.enter_context(RunningTarget(baton_target("pd", settings.model), _READY_S, say))
        runner = stack.enter_context(client_runner())
        copier.hear()
        endpoint = runner.run(probe(running.url, "completions", "", TIMEOUT_S))
        found = []
        for length in sorted({min(length, limit) for length in lengths}):
            say(f"handoffs of {length} tokens")
            warm_up = runner.run(ask(endpoint, prompts.conversation(length, _NUM_OUTPUT_TOKENS)))
            samples = HandoffSamples(length, num_moved_bytes(warm_up), config.num_layers)
            for _ in range(settings.num_rounds):
                copy_s_per_byte = float(copier.ask("copy")) / settings.buffer_bytes
                outcome = runner.run(ask(endpoint, prompts.conversation(length, _NUM_OUTPUT_TOKENS)))
                samples.add(outcome, copy_s_per_byte)
            found.append(samples)
    return found


def handoff_ratios(samples: HandoffSamples) -> list[Ratio]:
    """Both figures of one length of prompt."""
    case = f"prompt of {samples.num_prompt_tokens} tokens"
    exposed_us, copy_us = median(samples.exposed_us), median(samples.copy_us)
    goal = f"{1 / samples.num_layers:.3g} (one layer of {samples.num_layers})"
    note = f"{samples.num_bytes / 2**20:.1f} MiB: {exposed_us:.0f} us exposed, a copy takes {copy_us:.0f} us"
    p99 = f"p99 {percentile(samples.handover_us, 99):.0f} us, one request at a time"
    return [
        ratio_of("exposed_ratio", case, samples.exposed_us, samples.copy_us, goal=goal, note=note),
        range_of("handover_us", case, samples.handover_us, "us", "the router's way", p99),
    ]


def num_moved_bytes(outcome: Outcome) -> int:
    """What the handoff of a request moved. Raises `RequestFailed` when there was none."""
    transfer = outcome.usage.get("kv_transfer")
    if not isinstance(transfer, dict):
        raise RequestFailed("an answer came without a handoff: is its prompt too short for one?")
    return int(transfer["bytes"])
