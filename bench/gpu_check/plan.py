"""What will be checked and measured, and how long each group may take.

Owns the list of checks. A check is named here and computed in the process of its group
(`bench.gpu_check.NAME_process`), so that a check which never
reports is noticed. Invariant: all groups together end within `TOTAL_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_check.attention_cases import DTYPES, HEAD_SIZES, attention_cases
from wire.errors import InvalidSetting

TOTAL_S = 470.0
"""Below 8 minutes, with time to start and to print."""
KV_BLOCKS = (8, 64, 512)
TRANSPORTS = ("auto", "shm", "zmq", "nixl", "nccl")
DECODE_BATCHES = (1, 8, 64)
MODELS = ("8B", "0.6B")


@dataclass(frozen=True, slots=True)
class Check:
    """One question to a group's process. The rows of the answer must stand for `num_cases` cases together."""

    name: str
    num_cases: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Checks that share a process. `seconds`: when it is ended, whatever it does; `quick_seconds` under `--quick`."""

    name: str
    doc: str
    seconds: float
    quick_seconds: float
    checks: tuple[Check, ...]

    def limit_s(self, *, quick: bool) -> float:
        """What this group may take."""
        return self.quick_seconds if quick else self.seconds


def all_groups(*, quick: bool) -> tuple[Group, ...]:
    """Correctness first, then speed, each in the order in which a reader wants to know."""
    num_attention = len(attention_cases(quick=quick))
    attention = [Check(f"{dtype}/{size}", num_attention) for dtype in DTYPES for size in HEAD_SIZES]
    attention.append(Check("graph plans"))
    models = MODELS[:1] if quick else MODELS
    served = _checks(*(("auto", "nixl") if quick else TRANSPORTS), "divergence")
    transfer = _checks(*(("shm",) if quick else TRANSPORTS[1:]))
    throughput = _checks(*models) if quick else _checks(*MODELS, "0.6B compiled")
    return (
        Group("attention", "attention against float64", 65, 60, tuple(attention)),
        Group("operations", "fused operations against plain torch", 25, 25, _checks("error", "bandwidth")),
        Group("device", "checksums and sampler on the device", 30, 25, _checks("checksum", "sampler")),
        Group("graphs", "recorded decode steps against eager ones", 40, 40, _checks("tokens", "step time")),
        Group("served", "prefill and decode node, tokens against transformers", 75, 130, served),
        Group("transfer", "rate of KV handoffs between two processes", 55, 60, transfer),
        Group("decode", "decode steps against memory bandwidth", 45, 25, _checks(*models)),
        Group("prefill", "a prompt of 8,192 tokens against matrix products", 25, 25, _checks(*models)),
        Group("exposed", "what is left of the transfer at 8,192 tokens", 40, 40, _checks("exposed transfer")),
        Group("throughput", "offline generation against transformers", 70, 40, throughput),
    )


def chosen_groups(only: str, *, quick: bool) -> tuple[Group, ...]:
    """Those that `only` names ("a,b"); "" names all. Raises `InvalidSetting`."""
    groups = {group.name: group for group in all_groups(quick=quick)}
    names = [name for name in map(str.strip, only.split(",")) if name]
    for name in names:
        if name not in groups:
            raise InvalidSetting(f"--only {name!r:.40} is not one of {', '.join(groups)}")
    return tuple(group for group in groups.values() if not names or group.name in names)


def _checks(*names: str) -> tuple[Check, ...]:
    return tuple(map(Check, names))
