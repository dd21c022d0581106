"""Placement: the cores and the accelerators of each node of this machine.

Owns the split, and what it makes of a node's settings. Does not know what a node does with it.
Invariants: every node gets at least one thread; pinned nodes never share a core.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from baton.engine.native.loans import Lending
from baton.node.settings import NodeSettings
from baton.wire.messages.membership import DECODE, PREFILL

CPU_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")
DEVICE_FOLDER = Path("/dev")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_NodeSettingsT = TypeVar("_NodeSettingsT", bound=NodeSettings)


@dataclass(frozen=True, slots=True)
class Cpus:
    """Cores this process may run on, and how many of them it may keep busy at once (a container's quota)."""

    ids: tuple[int, ...]
    num_usable: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One node's share. `cpu_ids` is empty when it is not pinned, `device` when the node sees every accelerator: else
    it names those of its ranks, with commas between. At most `num_sharing` nodes use the same one, this one included.
    """

    num_threads: int
    cpu_ids: tuple[int, ...] = ()
    device: str = ""
    num_sharing: int = 1


def find_cpus(quota_file: Path = CPU_QUOTA_FILE) -> Cpus:
    """The cores of this process."""
    num_cpus = os.cpu_count() or 1
    # Not on every system: macOS has no affinity.
    ids = tuple(sorted(os.sched_getaffinity(0))) if "sched_getaffinity" in dir(os) else tuple(range(num_cpus))
    return Cpus(ids, min(len(ids), _cpu_quota(quota_file) or len(ids)))


def find_devices(environment: Mapping[str, str], folder: Path = DEVICE_FOLDER) -> list[str]:
    """Accelerators of this machine, as `CUDA_VISIBLE_DEVICES` names them."""
    if VISIBLE_DEVICES in environment:
        return [name for name in environment[VISIBLE_DEVICES].split(",") if name]
    num_devices = sum(1 for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    return [str(index) for index in range(num_devices)]


def place_nodes(
    num_nodes: int, cpus: Cpus, devices: list[str], *, pin_cpus: bool, num_ranks: Sequence[int] = ()
) -> list[Placement]:
    """One share per node: cores split evenly, accelerators in turn.

    `num_ranks`: of each node on this machine, where not all of them have one; a rank has an accelerator of its own.
    Cores are pinned only when each node gets at least one and no quota limits them. Under a quota the kernel knows
    better which cores are free.
    """
    num_threads = max(1, cpus.num_usable // num_nodes)
    can_pin = pin_cpus and num_nodes <= len(cpus.ids) == cpus.num_usable
    taken = _in_turn(devices, num_ranks or [1] * num_nodes)
    users = Counter(device for of_node in taken for device in of_node)
    return [
        Placement(
            num_threads,
            cpus.ids[index * num_threads : (index + 1) * num_threads] if can_pin else (),
            ",".join(taken[index]) if len(devices) > 1 else "",
            max((users[device] for device in taken[index]), default=1),
        )
        for index in range(num_nodes)
    ]


def _in_turn(devices: list[str], num_ranks: Sequence[int]) -> list[list[str]]:
    """The accelerators of each node. One with more ranks than there are gets all of them, and says so."""
    found, first = [], 0
    for count in num_ranks:
        found.append([devices[(first + place) % len(devices)] for place in range(min(count, len(devices)))])
        first += count
    return found


def shares_of(
    settings: NodeSettings,
    num_nodes: int,
    environment: Mapping[str, str],
    *,
    pin_cpus: bool,
    num_ranks: Sequence[int] = (),
) -> list[Placement]:
    """The share of this machine of each of `num_nodes` such nodes. Threads that the settings name are theirs.
    `num_ranks`: see `place_nodes`."""
    # a named device is an index among the devices that this process sees, so nodes must see the same ones
    devices = [settings.device] if settings.device.startswith("cuda:") else find_devices(environment)
    pins = pin_cpus and not settings.num_threads
    shares = place_nodes(num_nodes, find_cpus(), devices, pin_cpus=pins, num_ranks=num_ranks)
    return [replace(share, num_threads=settings.num_threads or share.num_threads) for share in shares]


def lendings(roles: Sequence[str], shares: Sequence[Placement], descriptor: int) -> list[Lending]:
    """For each node the cores that prefill and decode nodes lend each other. `descriptor`: of the page.

    The cores of a node are lent to one other, so that no two guests share a core. Decode nodes rest for prefill nodes.
    """
    numbers = {role: [number for number, each in enumerate(roles) if each == role] for role in (PREFILL, DECODE)}
    borrower = {
        number: numbers[to][place % len(numbers[to])]
        for of, to in ((PREFILL, DECODE), (DECODE, PREFILL))
        for place, number in enumerate(numbers[of])
    }
    return [
        Lending(
            descriptor,
            number,
            (borrower[number],) if role == DECODE else (),
            tuple((core, lender) for lender, to in borrower.items() if to == number for core in shares[lender].cpu_ids),
        )
        for number, role in enumerate(roles)
    ]


def placed(settings: _NodeSettingsT, share: Placement, num_nodes: int) -> _NodeSettingsT:
    """The settings of a node that has this share of the machine, as one of `num_nodes`."""
    return replace(
        settings,
        num_threads=share.num_threads,
        cpu_affinity=",".join(map(str, share.cpu_ids)) or settings.cpu_affinity,
        gpu_memory_utilization=round(settings.gpu_memory_utilization / share.num_sharing, 4),
        cpu_memory_utilization=round(settings.cpu_memory_utilization / num_nodes, 4),
    )


def _cpu_quota(file: Path) -> int | None:
    """Whole cores of a cgroup v2 quota ("200000 100000" is two), None without one."""
    try:
        quota, period = file.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return None
