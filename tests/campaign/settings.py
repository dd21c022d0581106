"""The settings of a campaign, from its command line."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIER_KINDS = ("kv-flip", "kv-cut", "kv-swap", "kv-remove", "kv-read-only", "kv-stall")
STORE_KINDS = ("store-kill", "store-freeze", "store-lie")
ALL_KINDS = (
    "kill",
    "kill-together",
    "restart",
    "drain",
    "freeze",
    "slow",
    "cut",
    "delay",
    "throttle",
    "loss",
    "hole",
    "hole-one-way",
    "flip",
    "replay",
    "descriptors",
    "disk-full",
    "memory",
    "threads",
    "shm-full",
    "kill-agent",
    "kill-rank",
    "freeze-rank",
    "poison",
    "router-kill",
    "router-freeze",
    "router-slow",
    "router-disk-full",
    "router-memory",
    "router-threads",
    *TIER_KINDS,
    *STORE_KINDS,
)
"""Every kind of fault; `tests.campaign.schedule` says what each does. Those of tiers come where there are some."""
_SEEING = ("qwen2.5-vl", "qwen3-vl", "mistral3")
"""Families of models that see images, too."""
_MODELS = ("llama", "qwen2", "qwen3", *_SEEING)
_TRANSPORTS = ("shm", "zmq", "nixl")
_LAYOUT = re.compile(r"([1-9])P([1-9])D")
_DRAWN = "drawn"
NO_TIERS, DISK, VALKEY = "none", "disk", "valkey"
RESULTS = Path("build/campaigns.jsonl")
_FORKED_RECOVERY_S, _REAL_RECOVERY_S = 4.0, 20.0


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """What to run. Two campaigns with the same settings ask the same requests and plan the same faults.

    `model`: its family, with random weights. `step_s`: how long a step of a node takes at least, so that streams last
    long enough to be hit. `stall_s`: for how long a stream may make no progress while the router runs. `longest_s`: no
    fault lasts longer. `num_ranks`: of each node, with pools as `rank_pools` says, on so many `rank_machines`.
    `structured`: which share of completions has a grammar, a schema or a regular expression. `num_strangers`: clients
    that send random bodies. `is_mixed`: nodes do any leg, and prefer that of their name. `is_plaintext`: without a
    cluster key. `clocks_lie`: each program has a wall clock of its own, see `clocks`. `has_real_starts`: programs are
    started as users do, in place of being forked from one that has done the imports. `tiers`: what small pools have
    below them: host memory and a folder, or these and a server. `drafts`: every other node has drafts, from what its
    tenants were answered. `results`: gets a line of JSON.
    """

    num_faults: int
    minutes: float
    seed: int
    num_prefill: int
    num_decode: int
    num_ranks: int
    rank_pools: str
    rank_machines: int
    transport: str
    model: str
    dtype: str
    kv_cache_dtype: str
    structured: float
    is_mixed: bool
    is_plaintext: bool
    clocks_lie: bool
    num_clients: int
    num_strangers: int
    num_requests: int
    step_s: float
    stall_s: float
    longest_s: float
    max_tokens: int
    max_attempts: int
    kinds: tuple[str, ...]
    has_real_starts: bool
    tiers: str
    drafts: bool
    folder: Path
    results: Path

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.model in _SEEING

    @property
    def salted_share(self) -> float:
        """How many requests find nothing in a prefix cache, nor in a tier."""
        return 0.7 if self.tiers == NO_TIERS else 0.3

    @property
    def recovery_s(self) -> float:
        """For so long after a fault the plan does not count a node as a survivor: it starts again and joins. Ranks are
        never forked."""
        return _REAL_RECOVERY_S if self.has_real_starts or self.num_ranks > 1 else _FORKED_RECOVERY_S

    @property
    def command(self) -> str:
        """The command that replays this campaign."""
        switches = [" --mixed"] * self.is_mixed + [" --clocks-lie"] * self.clocks_lie
        switches += [f" --tiers {self.tiers}"] * (self.tiers != NO_TIERS)
        switches += [" --drafts"] * self.drafts
        switches += [" --plaintext"] * self.is_plaintext + [" --real-starts"] * self.has_real_starts
        return (
            f"python -m tests.campaign --faults {self.num_faults} --minutes {self.minutes:g} --seed {self.seed}"
            f" --layout {self.num_prefill}P{self.num_decode}D --tensor-parallel-size {self.num_ranks}"
            f" --rank-pools {self.rank_pools} --rank-machines {self.rank_machines}"
            f" --transport {self.transport} --model {self.model}"
            f" --dtype {self.dtype} --kv-cache-dtype {self.kv_cache_dtype} --structured {self.structured:g}"
            f" --clients {self.num_clients} --strangers {self.num_strangers} --requests {self.num_requests}"
            f" --step-ms {self.step_s * 1e3:g} --stall-s {self.stall_s:g} --longest-s {self.longest_s:g}"
            f" --max-tokens {self.max_tokens} --max-attempts {self.max_attempts} --kinds {','.join(self.kinds)}"
            f"{''.join(switches)}"
        )


def parse(argv: Sequence[str] | None = None) -> CampaignSettings:
    """The settings on a command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="how many faults")
    parser.add_argument("--minutes", type=float, default=0.0, help="over which they are spread; 0: one fault a second")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults; 0: a random one, which is printed")
    parser.add_argument("--layout", default="2P2D", help="nodes; drawn: 2P2D to 4P4D, by the seed")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of each node")
    parser.add_argument("--rank-pools", default="shared", choices=("shared", "own"), help="of those")
    parser.add_argument(
        "--rank-machines", type=int, default=1, choices=(1, 2), help="2: half of them in a `baton rank`"
    )
    parser.add_argument("--transport", default="shm", choices=("auto", *_TRANSPORTS, _DRAWN))
    parser.add_argument(
        "--model", default=_DRAWN, choices=(*_MODELS, _DRAWN), help="drawn: by the seed, half of them see"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--structured", type=float, default=0.08, help="share of completions with a grammar")
    parser.add_argument("--mixed", action="store_true", help="nodes do any leg, and prefer that of their name")
    parser.add_argument("--plaintext", action="store_true", help="no cluster key; links lie about KV only")
    parser.add_argument("--clocks-lie", action="store_true", help="each program has a wrong wall clock")
    parser.add_argument("--clients", type=int, default=8, help="requests that are open at any time")
    parser.add_argument("--strangers", type=int, default=2, help="clients that send random bodies")
    parser.add_argument("--requests", type=int, default=30, help="different requests; each has its reference")
    parser.add_argument("--step-ms", type=float, default=15.0, help="how long a step takes at least")
    parser.add_argument("--stall-s", type=float, default=30.0, help="longest time without progress")
    parser.add_argument("--longest-s", type=float, default=6.0, help="no fault lasts longer")
    parser.add_argument("--max-tokens", type=int, default=200, help="longest output")
    parser.add_argument("--max-attempts", type=int, default=50, help="of the router")
    parser.add_argument("--kinds", default=",".join(ALL_KINDS), help="kinds of faults, with commas")
    parser.add_argument("--real-starts", action="store_true", help="start programs as users do; each takes seconds")
    parser.add_argument(
        "--tiers", default=NO_TIERS, choices=(NO_TIERS, DISK, VALKEY), help="small pools above host memory and a folder"
    )
    parser.add_argument("--drafts", action="store_true", help="every other node has drafts, from answers before")
    parser.add_argument("--folder", type=Path, default=None, help="for logs, the timeline and the report")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file that gets a line of JSON")
    flags = parser.parse_args(argv)
    kinds = tuple(flags.kinds.split(","))
    if unknown := set(kinds) - set(ALL_KINDS):
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}; there are {', '.join(ALL_KINDS)}")
    seed = flags.seed or random.SystemRandom().randrange(1, 10**6)
    rng = random.Random(f"layout {seed}")
    layout = f"{rng.randint(2, 4)}P{rng.randint(2, 4)}D" if flags.layout == _DRAWN else flags.layout
    if (counts := _LAYOUT.fullmatch(layout)) is None:
        parser.error("--layout: such as 2P3D, or drawn")
    return CampaignSettings(
        num_faults=flags.faults,
        minutes=flags.minutes or round(flags.faults / 60, 3),
        seed=seed,
        num_prefill=int(counts[1]),
        num_decode=int(counts[2]),
        num_ranks=flags.tensor_parallel_size,
        rank_pools="own" if flags.rank_machines > 1 else flags.rank_pools,
        rank_machines=flags.rank_machines,
        transport=_drawn(flags.transport, "transport", seed, _TRANSPORTS),
        model=_drawn(flags.model, "model", seed, _MODELS),
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        structured=flags.structured,
        is_mixed=flags.mixed,
        is_plaintext=flags.plaintext,
        clocks_lie=flags.clocks_lie,
        num_clients=flags.clients,
        num_strangers=flags.strangers,
        num_requests=flags.requests,
        step_s=flags.step_ms / 1e3,
        stall_s=flags.stall_s,
        longest_s=flags.longest_s,
        max_tokens=flags.max_tokens,
        max_attempts=flags.max_attempts,
        kinds=kinds,
        has_real_starts=flags.real_starts,
        tiers=flags.tiers,
        drafts=flags.drafts,
        folder=flags.folder or Path(f"/tmp/baton-campaign-{seed}"),
        results=flags.results,
    )


def _drawn(wanted: str, what: str, seed: int, choices: Sequence[str]) -> str:
    return random.Random(f"{what} {seed}").choice(choices) if wanted == _DRAWN else wanted
