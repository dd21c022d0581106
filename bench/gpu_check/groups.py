"""What is checked and measured, and how long each group may take.

Owns the list. What must be right is a file of `tests/gpu`; what is measured is a name that the group's function in
`bench.gpu_check` knows. Invariant: all groups together end within `TOTAL_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import lists

TOTAL_S = 470.0
"""Below 8 minutes, with time to start and to print."""
TRANSPORTS = ("shm", "zmq", "nixl", "nccl")
MODELS = ("8B", "0.6B")


@dataclass(frozen=True, slots=True)
class Group:
    """`tests`: a file of `tests/gpu`, "" for none. `limit_s`: when the group is ended, whatever it does."""

    name: str
    doc: str
    limit_s: float
    tests: str = ""
    measures: tuple[str, ...] = ()


def all_groups(*, quick: bool) -> tuple[Group, ...]:
    """Correctness first, then speed, each in the order in which a reader wants to know."""
    models, transports = (MODELS[:1], TRANSPORTS[:1]) if quick else (MODELS, TRANSPORTS)
    return (
        Group("attention", "attention against float64", 65, "test_attention.py"),
        Group("operations", "fused operations against plain torch", 25, "test_operations.py", ("bandwidth",)),
        Group("device", "checksums and sampler on the device", 30, "test_device.py", ("checksums",)),
        Group("graphs", "recorded decode steps against eager ones", 40, "test_graphs.py", ("step time",)),
        Group("served", "prefill and decode node, tokens against transformers", 75, "test_relay.py"),
        Group("transfer", "KV handoffs between two processes", 55, "test_transfer.py", transports),
        Group("decode", "decode steps against memory bandwidth", 45, measures=models),
        Group("prefill", "a prompt of 8,192 tokens against matrix products", 25, measures=models),
        Group("exposed", "what is left of the transfer at 8,192 tokens", 40, measures=("exposed transfer",)),
        Group("throughput", "offline generation against transformers", 70, measures=models),
    )


def chosen_groups(only: str, *, quick: bool) -> tuple[Group, ...]:
    """Those that `only` names ("a,b"); "" names all. Raises `InvalidSetting`."""
    groups = all_groups(quick=quick)
    names = lists.names(only, "--only", [group.name for group in groups])
    return tuple(group for group in groups if not names or group.name in names)
