"""The settings of a campaign, from its command line."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    "hole",
    "hole-one-way",
    "descriptors",
    "shm-full",
    "kill-agent",
    "poison",
    "router-kill",
    "router-freeze",
    "router-slow",
)
"""Every kind of fault; `tests.campaign.schedule` says what each does."""


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """What to run. Two campaigns with the same settings ask the same requests and plan the same faults.

    `step_s`: how long a step of a node takes at least, so that streams last long enough to be hit. `stall_s`: for how
    long a stream may make no progress while the router runs. `longest_s`: no fault lasts longer.
    """

    num_faults: int
    minutes: float
    seed: int
    num_prefill: int
    num_decode: int
    transport: str
    dtype: str
    num_clients: int
    num_requests: int
    step_s: float
    stall_s: float
    longest_s: float
    max_tokens: int
    max_attempts: int
    kinds: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> str:
        """The command that replays this campaign."""
        return (
            f"python -m tests.campaign --faults {self.num_faults} --minutes {self.minutes:g} --seed {self.seed}"
            f" --prefill {self.num_prefill} --decode {self.num_decode} --transport {self.transport}"
            f" --dtype {self.dtype} --clients {self.num_clients} --requests {self.num_requests}"
            f" --step-ms {self.step_s * 1e3:g} --stall-s {self.stall_s:g} --longest-s {self.longest_s:g}"
            f" --max-tokens {self.max_tokens} --max-attempts {self.max_attempts} --kinds {','.join(self.kinds)}"
        )


def parse(argv: Sequence[str] | None = None) -> CampaignSettings:
    """The settings on a command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--faults", type=int, default=60, help="how many faults")
    parser.add_argument("--minutes", type=float, default=5.0, help="the time over which they are spread")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults; 0: a random one, which is printed")
    parser.add_argument("--prefill", type=int, default=2, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=2, help="decode nodes")
    parser.add_argument("--transport", default="shm", choices=("auto", "shm", "zmq", "nixl"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--clients", type=int, default=10, help="requests that are open at any time")
    parser.add_argument("--requests", type=int, default=40, help="different requests; each has its reference")
    parser.add_argument("--step-ms", type=float, default=8.0, help="how long a step takes at least")
    parser.add_argument("--stall-s", type=float, default=30.0, help="longest time without progress")
    parser.add_argument("--longest-s", type=float, default=30.0, help="no fault lasts longer")
    parser.add_argument("--max-tokens", type=int, default=800, help="longest output")
    parser.add_argument("--max-attempts", type=int, default=50, help="of the router")
    parser.add_argument("--kinds", default=",".join(ALL_KINDS), help="kinds of faults, with commas")
    parser.add_argument("--folder", type=Path, default=None, help="for logs, the timeline and the report")
    flags = parser.parse_args(argv)
    kinds = tuple(flags.kinds.split(","))
    if unknown := set(kinds) - set(ALL_KINDS):
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}; there are {', '.join(ALL_KINDS)}")
    if flags.prefill < 1 or flags.decode < 1:
        parser.error("at least one prefill node and one decode node are needed")
    seed = flags.seed or random.SystemRandom().randrange(1, 10**6)
    return CampaignSettings(
        num_faults=flags.faults,
        minutes=flags.minutes,
        seed=seed,
        num_prefill=flags.prefill,
        num_decode=flags.decode,
        transport=flags.transport,
        dtype=flags.dtype,
        num_clients=flags.clients,
        num_requests=flags.requests,
        step_s=flags.step_ms / 1e3,
        stall_s=flags.stall_s,
        longest_s=flags.longest_s,
        max_tokens=flags.max_tokens,
        max_attempts=flags.max_attempts,
        kinds=kinds,
        folder=flags.folder or Path(f"/tmp/baton-campaign-{seed}"),
    )
