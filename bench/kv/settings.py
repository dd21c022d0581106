"""Settings of `baton bench kv`, and what they mean together."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.integrity import CHECKSUMS
from kvtransfer.transports.registry import NCCL, NIXL, SHM, ZMQ
from program.settings import setting
from wire.errors import InvalidSetting

TRANSPORTS = (SHM, ZMQ, NIXL, NCCL)
ALL = "all"
_LIBRARIES = {NIXL: ("nixl", "baton-serve[nixl]"), NCCL: ("torch", "torch")}
_BLOCK_UNIT_BYTES = 64


@dataclass(frozen=True, slots=True)
class KvBenchSettings:
    """Settings of `baton bench kv`."""

    transports: str = setting(ALL, "transports to measure: all, or some of shm,zmq,nixl,nccl")
    blocks: str = setting("1,8,64,512", "sizes of handoffs in blocks")
    block_bytes: int = setting(2**20, "bytes of a block, a multiple of 64")
    checksum: str = setting("xxh3,none", "measure with and without checksums: some of xxh3,dot64,none")
    rounds: int = setting(15, "handoffs of each size; ten times as many where one is small")
    cores: str = setting("", "cores of the prefill and the decode process: P,D; empty: the first two of this process")
    min_pool_bytes: int = setting(2**28, "smallest pool; handoffs move through it, so that caches stay cold")
    json: str = setting("", "file for every sample, with the command and the machine")
    plot: str = setting("", "file for a picture (PNG) of rate over size; needs matplotlib")
    markdown: bool = setting(False, "print tables for a document instead")
    quick: bool = setting(False, "tiny sizes and two rounds: whether it works, not how fast")


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured. `missing` has the reason for each transport that was not asked for by name; `device` is
    where the pools lie, as torch names it, "" for host memory.
    """

    transports: tuple[str, ...]
    missing: dict[str, str]
    blocks: tuple[int, ...]
    block_bytes: int
    small_block_bytes: int
    checksums: tuple[str, ...]
    num_rounds: int
    cores: tuple[int, int] | None
    min_pool_bytes: int
    limit_bytes: int
    hashing_s: float
    is_quick: bool
    device: str = ""


def plan(settings: KvBenchSettings) -> Plan:
    """Resolve settings on this machine. Raises `InvalidSetting`."""
    if settings.quick:
        settings = _made_quick(settings)
    blocks = tuple(_count(text, "--blocks") for text in _items(settings.blocks, "--blocks"))
    if settings.block_bytes <= 0 or settings.block_bytes % _BLOCK_UNIT_BYTES:
        raise InvalidSetting(f"--block-bytes {settings.block_bytes} is not a multiple of {_BLOCK_UNIT_BYTES}")
    if settings.rounds < 1:
        raise InvalidSetting(f"--rounds {settings.rounds} is not at least 1")
    if settings.plot and importlib.util.find_spec("matplotlib") is None:
        raise InvalidSetting("--plot: matplotlib is not installed: pip install 'baton-serve[bench]'")
    transports, missing = _transports(settings.transports)
    return Plan(
        transports=transports,
        missing=missing,
        blocks=blocks,
        block_bytes=settings.block_bytes,
        small_block_bytes=2**16,
        checksums=_choices(settings.checksum, "--checksum", CHECKSUMS),
        num_rounds=settings.rounds,
        cores=_cores(settings.cores),
        min_pool_bytes=settings.min_pool_bytes,
        limit_bytes=2**22 if settings.quick else 2**28,
        hashing_s=0.03 if settings.quick else 0.3,
        is_quick=settings.quick,
    )


def _made_quick(settings: KvBenchSettings) -> KvBenchSettings:
    """What was left at its default becomes tiny."""
    tiny = {"blocks": "1,4", "block_bytes": 2**16, "rounds": 2, "min_pool_bytes": 2**20}
    defaults = {field.name: field.default for field in dataclasses.fields(KvBenchSettings)}
    given = dataclasses.asdict(settings)
    changes = {name: value for name, value in tiny.items() if given[name] == defaults[name]}
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def _transports(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """(available, {missing: why})."""
    reasons = {name: reason for name in TRANSPORTS if (reason := _reason_missing(name))}
    if text == ALL:
        return tuple(name for name in TRANSPORTS if name not in reasons), reasons
    chosen = _choices(text, "--transports", TRANSPORTS)
    for name in chosen:
        if name in reasons:
            raise InvalidSetting(f"--transports {name}: {reasons[name]}")
    return chosen, {}


def _reason_missing(name: str) -> str:
    package, requirement = _LIBRARIES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install '{requirement}'"
    return ""


def _cores(text: str) -> tuple[int, int] | None:
    available = sorted(os.sched_getaffinity(0))
    if not text:
        return (available[0], available[1]) if len(available) > 1 else None
    given = [_count(item, "--cores", lowest=0) for item in _items(text, "--cores")]
    if len(given) != 2 or not set(given) <= set(available):
        raise InvalidSetting(f"--cores {text} is not two of {', '.join(map(str, available))}")
    return (given[0], given[1])


def _choices(text: str, flag: str, choices: Sequence[str]) -> tuple[str, ...]:
    chosen = _items(text, flag)
    for name in chosen:
        if name not in choices:
            raise InvalidSetting(f"{flag} {name!r:.40} is not one of {', '.join(choices)}")
    return tuple(dict.fromkeys(chosen))


def _items(text: str, flag: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise InvalidSetting(f"{flag} names nothing")
    return items


def _count(text: str, flag: str, lowest: int = 1) -> int:
    try:
        count = int(text)
    except ValueError:
        count = lowest - 1
    if count < lowest:
        raise InvalidSetting(f"{flag}: {text!r:.40} is not a number from {lowest} on")
    return count
