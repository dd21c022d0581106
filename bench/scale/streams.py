"""Many streams through a real router, over many nodes: what a token's way takes, and the router's share of a core.

The router is a process with the demo model's tokenizer; nodes are in one process, clients are this one. A token's way
is from the moment its node has made it until its bytes are here, so it includes the network's and this process's part;
only tokens count that were made while all streams ran.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from baton.bench.child import Child as Commanded
from baton.bench.limits.router_hop import Received, receive_streams
from baton.bench.numbers import percentile
from baton.bench.scale.numbered_prompts import numbered_prompt
from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.engine.models.config import load_config
from baton.engine.models.identity import model_fingerprint
from baton.engine.text.tokenizer import Tokenizer
from baton.runtime.child import PIPE, Child
from baton.wire.errors import RequestFailed

_NODES = "baton.bench.scale.fake_nodes_process"
_READY_S, _WAIT_S = 60.0, 240.0
_CPUCLOCK_SCHED = 2
_MANY = 2**20


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    """`num_streams` of `num_tokens`, one token each `interval_s`, over these nodes."""

    num_streams: int = 2_000
    num_prefills: int = 20
    num_decodes: int = 80
    num_tokens: int = 60
    interval_s: float = 0.2
    num_prompt_tokens: int = 64


@dataclass(frozen=True, slots=True)
class StreamsFound:
    """`way_s`: of a token, percentiles 50 and 99; `lag_s`: of the router's event loop, the bound below which 99 % are,
    and its worst by the loop's own work. `cpu_us`: of the router for a token, heartbeats and all included.
    `core_share`: while all streams ran, of `tokens_per_s`. `idle_share`: with the nodes alone."""

    plan: StreamsPlan
    way_p50_s: float
    way_p99_s: float
    lag_p99_s: float
    lag_worst_own_s: float
    cpu_us: float
    core_share: float
    tokens_per_s: float
    idle_share: float
    start_us: float


def measure_streams(plan: StreamsPlan) -> StreamsFound:
    """Raises `RequestFailed`, `ChildFailed`."""
    token_id = Tokenizer.from_folder(checkpoint_path()).encode(" word")[-1]
    fingerprint = model_fingerprint(checkpoint_path(), load_config(checkpoint_path()))
    flags = ("--port=0", "--control-port=0", "--shutdown-timeout-s=1", "--log-level=error", "--no-page")
    limits = (f"--max-connections-per-address={_MANY}", f"--max-concurrent-requests={_MANY}", "--max-connections=65536")
    with Child("router", *flags, *limits, stdout=PIPE) as router:
        ready = router.wait_ready(_READY_S)
        spec = {"address": ready.control_address, "fingerprint": fingerprint, "token_id": token_id}
        spec |= {"num_prefills": plan.num_prefills, "num_decodes": plan.num_decodes}
        with Commanded(_NODES, spec) as nodes:
            nodes.hear(_WAIT_S)
            idle_s = _idle_share(router.pid, nodes)
            return _measure(plan, router.pid, ready.address, nodes, idle_s)


def _measure(plan: StreamsPlan, pid: int, address: str, nodes: Commanded, idle_share: float) -> StreamsFound:
    limit_s = plan.num_tokens * plan.interval_s + _WAIT_S
    nodes.tell("emit", count=plan.num_streams, interval_s=plan.interval_s, limit_s=limit_s)
    prompts = [numbered_prompt(number, plan.num_prompt_tokens) for number in range(plan.num_streams)]
    sampler = _CpuSampler(pid)
    received = receive_streams(address, DEMO_MODEL_NAME, prompts, plan.num_tokens, limit_s, sampler.sample)
    ways_s, begun_s, ended_s = ways(received, nodes.hear(_WAIT_S))
    cpu_s, wall_s = sampler.between(begun_s, ended_s)
    started_s = sampler.between(received[0].sent_s, begun_s)[0]
    lag_p99_s, worst_own_s = _lag(address)
    tokens_per_s = plan.num_streams / plan.interval_s
    return StreamsFound(
        plan,
        percentile(ways_s, 50),
        percentile(ways_s, 99),
        lag_p99_s,
        worst_own_s,
        cpu_us=1e6 * cpu_s / (wall_s * tokens_per_s),
        core_share=cpu_s / wall_s,
        tokens_per_s=tokens_per_s,
        idle_share=idle_share,
        start_us=1e6 * started_s / plan.num_streams,
    )


def ways(received: Sequence[Received], made_s: Sequence[Sequence[float]]) -> tuple[list[float], float, float]:
    """Seconds of each token that was made while all streams ran, and when that began and ended. Raises `RequestFailed`
    when there was no such time."""
    begun_s = max(each.token_s[0] for each in received)
    ended_s = min(each[-1] for each in made_s)
    found = [
        came_s - at_s
        for each, stamps_s in zip(received, made_s, strict=True)
        for came_s, at_s in zip(each.token_s, stamps_s, strict=True)
        if begun_s <= at_s <= ended_s
    ]
    if not found:
        raise RequestFailed("no time when all streams ran: more --tokens make them last")
    return found, begun_s, ended_s


class _CpuSampler:
    """When a process had used how much CPU time, each time something was received."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | _CPUCLOCK_SCHED  # clock_getcpuclockid(3)
        self._samples = [(time.monotonic(), time.clock_gettime(self._clock))]

    def sample(self) -> None:
        self._samples.append((time.monotonic(), time.clock_gettime(self._clock)))

    def between(self, begun_s: float, ended_s: float) -> tuple[float, float]:
        """CPU seconds and seconds between the samples next to two moments."""
        before = max((each for each in self._samples if each[0] <= begun_s), default=self._samples[0])
        behind = min((each for each in self._samples if each[0] >= ended_s), default=self._samples[-1])
        return behind[1] - before[1], behind[0] - before[0]


def _idle_share(pid: int, nodes: Commanded) -> float:
    sampler, seconds = _CpuSampler(pid), 3.0
    nodes.ask("idle", for_s=seconds)
    sampler.sample()
    cpu_s, wall_s = sampler.between(0.0, time.monotonic() + seconds)
    return cpu_s / wall_s


def _lag(base_url: str) -> tuple[float, float]:
    with urllib.request.urlopen(f"http://{urlsplit(base_url).netloc}/metrics", timeout=_WAIT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("baton:event_loop")]
    buckets = sorted((float(each.labels["le"]), each.value) for each in samples if each.name.endswith("_bucket"))
    p99_s = next(bound for bound, count in buckets if count >= 0.99 * buckets[-1][1])
    worst = next(each.value for each in samples if each.name == "baton:event_loop_own_lag_max_seconds")
    return p99_s, worst
