"""Which faults happen when: a pure function of the settings and their seed.

A fault has a target and a time to last. One rule keeps streams servable: at every moment at least one decode node is
left alone and has been for `recovery_s`, except by "kill-together", "poison" and faults of the router, which are about
just that. So an error outside of those is a finding.

| kind | what happens |
|---|---|
| kill | SIGKILL; the node is started again after `lasts_s` |
| kill-together | all decode nodes are killed within 0.2 s |
| restart | SIGTERM; the node drains, exits with 0 and is started again |
| drain | the same, asked for at the router as an operator does |
| freeze | SIGSTOP, and SIGCONT after `lasts_s` |
| slow | SIGSTOP and SIGCONT in turn, `strength` of the time stopped |
| cut | the connections of a link are reset, and new ones refused |
| delay | what passes the link comes later: by 10 ms to 0.5 s |
| throttle | the link carries 2 to 64 kB/s |
| loss | packets of the link are lost: one chunk in thirty comes late by TCP's repetition, all by up to 0.1 s |
| hole, hole-one-way | nothing passes; what was sent meanwhile comes at the end, or the connections are reset then |
| flip | in one of five chunks that pass the link a bit is turned |
| replay | behind one of five chunks that pass the link comes an earlier one again |
| descriptors | the soft limit of open files is what is open now; the node lives |
| disk-full | no file may grow: logs, journals, segments of shared memory |
| memory | the address space may not grow; a node may die of it |
| threads | the node gets no more threads and no more children; it lives |
| shm-full | /dev/shm has no page left, and a node is killed and started again meanwhile |
| kill-agent | SIGKILL for the NIXL agent of a node |
| kill-rank | SIGKILL for a rank of a node; the node ends, and is started again after `lasts_s` |
| freeze-rank | SIGSTOP for a rank, and SIGCONT after `lasts_s`; the node may end of it |
| poison | a request comes of which every node dies that computes it |
| kv-flip, kv-cut, kv-swap | some files of KV blocks have a turned bit, lose their end, or change names with others |
| kv-remove | some files are deleted, or the whole folder, or there is a file in its place; it is back after `lasts_s` |
| kv-read-only | nothing can be written into the folder |
| kv-stall | whoever opens, reads or writes files of the folder waits |
| store-kill, store-freeze | SIGKILL or SIGSTOP for the server of KV blocks, which runs again after `lasts_s` |
| store-lie | some values of the server are damaged, cut, those of other keys, or of another type |
| router-... | the same to the router; one that was killed, or died of having no memory, is started again at once |
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tests.campaign import thread_limit
from tests.campaign.settings import NO_TIERS, STORE_KINDS, TIER_KINDS, VALKEY, CampaignSettings

_WEIGHTS = {
    "kill": 26,
    "kill-together": 2,
    "restart": 5,
    "drain": 5,
    "freeze": 16,
    "slow": 7,
    "cut": 10,
    "delay": 6,
    "throttle": 5,
    "loss": 6,
    "hole": 6,
    "hole-one-way": 6,
    "flip": 4,
    "replay": 4,
    "descriptors": 4,
    "disk-full": 4,
    "memory": 3,
    "threads": 4,
    "shm-full": 2,
    "kill-agent": 6,
    "kill-rank": 12,
    "freeze-rank": 6,
    "poison": 1,
    "router-kill": 2,
    "router-freeze": 3,
    "router-slow": 2,
    "router-disk-full": 1,
    "router-memory": 1,
    "router-threads": 2,
    "kv-flip": 16,
    "kv-cut": 8,
    "kv-swap": 6,
    "kv-remove": 8,
    "kv-read-only": 6,
    "kv-stall": 12,
    "store-kill": 8,
    "store-freeze": 8,
    "store-lie": 16,
}
_LASTS_S = {
    "kill": (0.02, 3.0),
    "kill-together": (0.02, 2.0),
    "restart": (0.02, 1.0),
    "drain": (0.02, 1.0),
    "freeze": (0.1, 60.0),
    "slow": (2.0, 15.0),
    "cut": (0.01, 6.0),
    "delay": (1.0, 10.0),
    "throttle": (1.0, 10.0),
    "loss": (1.0, 10.0),
    "hole": (0.1, 20.0),
    "hole-one-way": (0.1, 20.0),
    "flip": (0.1, 6.0),
    "replay": (0.1, 6.0),
    "descriptors": (1.0, 8.0),
    "disk-full": (1.0, 10.0),
    "memory": (1.0, 8.0),
    "threads": (1.0, 8.0),
    "shm-full": (4.0, 12.0),
    "kill-agent": (0.0, 0.0),
    "kill-rank": (0.02, 3.0),
    "freeze-rank": (0.1, 60.0),
    "poison": (0.0, 0.0),
    "router-kill": (0.02, 1.0),
    "router-freeze": (0.1, 60.0),
    "router-slow": (2.0, 10.0),
    "router-disk-full": (1.0, 10.0),
    "router-memory": (1.0, 8.0),
    "router-threads": (1.0, 8.0),
    "kv-flip": (0.0, 0.0),
    "kv-cut": (0.0, 0.0),
    "kv-swap": (0.0, 0.0),
    "kv-remove": (0.1, 4.0),
    "kv-read-only": (0.5, 8.0),
    "kv-stall": (0.5, 10.0),
    "store-kill": (0.05, 3.0),
    "store-freeze": (0.2, 10.0),
    "store-lie": (0.0, 0.0),
}
_ON_ALL = ("kill-together", "poison")
_ON_LINKS = ("cut", "delay", "throttle", "loss", "hole", "hole-one-way", "flip", "replay")
_LIES = ("flip", "replay")
"""Without a cluster key only where blocks of KV pass, which have checksums: over zmq, what a decode node listens at."""
ROUTER_TARGET, TIERS_TARGET = "router", "tiers"
STORE_LINK = "store"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target`: "prefill-0", "decode-1", "router", or "tiers": the folder and the server of KV blocks that
    all nodes share. `link`: "control" (node and router), "peer" (what other nodes dial) or "store" (decode nodes and
    that server). `strength` and `choice` are in [0, 1) and mean what the kind makes of them."""

    number: int
    at_s: float
    kind: str
    target: str
    lasts_s: float
    link: str
    strength: float
    choice: float

    @property
    def is_of_tiers(self) -> bool:
        """Whether what no node depends on is hit."""
        return self.target == TIERS_TARGET

    @property
    def is_of_router(self) -> bool:
        """Whether the router itself is hit."""
        return self.target == ROUTER_TARGET

    def __str__(self) -> str:
        link = f" {self.link} link" if self.link else ""
        return f"#{self.number} {self.kind} {self.target}{link} for {self.lasts_s:.2f} s"


def plan(settings: CampaignSettings, *, has_private_shm: bool) -> list[Fault]:
    """All faults in order of their time. Without a /dev/shm of its own a campaign does not fill it, nor does it mount
    anything. Where clocks lie no router dies: the next one takes journals for older than they are."""
    rng = random.Random(f"faults {settings.seed}")
    left_out = {"shm-full"} if not has_private_shm or settings.transport == "zmq" else set()
    is_open = settings.is_plaintext
    left_out |= set(_LIES) if is_open and settings.transport != "zmq" else set()
    left_out |= {"kill-agent"} if settings.transport != "nixl" else set()
    left_out |= {"kill-rank", "freeze-rank"} if settings.num_ranks == 1 else set()
    left_out |= set() if thread_limit.is_possible() else {"threads", "router-threads"}
    left_out |= {"router-kill", "router-memory"} if settings.clocks_lie else set()
    left_out |= set(TIER_KINDS) if settings.tiers == NO_TIERS else set() if has_private_shm else {"kv-read-only"}
    left_out |= set(STORE_KINDS) if settings.tiers != VALKEY else set()
    left_out |= {"kill-together"} if settings.num_decode < 2 else set()
    kinds = [kind for kind in settings.kinds if kind not in left_out]
    links = ("control", "peer", STORE_LINK) if settings.tiers == VALKEY else ("control", "peer")
    faults: list[Fault] = []
    if not kinds:
        return faults
    nodes = [f"prefill-{index}" for index in range(settings.num_prefill)]
    decodes = [f"decode-{index}" for index in range(settings.num_decode)]
    hit_until_s = dict.fromkeys([*nodes, *decodes], 0.0)
    for number, at_s in enumerate(sorted(rng.uniform(0, settings.minutes * 60) for _ in range(settings.num_faults))):
        kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        low_s, high_s = (min(lasts_s, settings.longest_s) for lasts_s in _LASTS_S[kind])
        lasts_s = math.exp(rng.uniform(math.log(low_s), math.log(high_s))) if high_s else 0.0
        link = rng.choice(links) if kind in _ON_LINKS else ""
        target = TIERS_TARGET if link == STORE_LINK else _target(rng, kind, nodes, decodes, hit_until_s, at_s)
        if is_open and kind in _LIES:
            link, target = "peer", rng.choice(decodes)
        for hit in decodes if kind in _ON_ALL else [target]:
            if hit in hit_until_s:
                hit_until_s[hit] = max(hit_until_s[hit], at_s + lasts_s + settings.recovery_s)
        faults.append(Fault(number, at_s, kind, target, lasts_s, link, rng.random(), rng.random()))
    return faults


def _target(
    rng: random.Random, kind: str, nodes: list[str], decodes: list[str], hit_until_s: dict[str, float], at_s: float
) -> str:
    if kind.startswith("router-"):
        return ROUTER_TARGET
    if kind in TIER_KINDS or kind in STORE_KINDS:
        return TIERS_TARGET
    wanted = rng.choice([*nodes, *decodes])
    if kind in _ON_ALL:
        return decodes[0]
    survivors = [name for name in decodes if name != wanted and hit_until_s[name] <= at_s]
    if wanted in decodes and not survivors:
        return rng.choice(nodes)
    return wanted
