"""Settings of `baton bench kv`, and what they mean together on this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass

from bench import lists
from bench.arguments import require_at_least
from kvtransfer.integrity import CHECKSUMS
from kvtransfer.transports.registry import NCCL, NIXL, SHM, ZMQ
from program.settings import setting
from wire.errors import InvalidSetting

TRANSPORTS = (SHM, ZMQ, NIXL, NCCL)
Cores = tuple[int, int] | tuple[None, None]
"""Of two processes; None: any."""
_ALL = "all"
_LIBRARIES = {NIXL: ("nixl", "baton-serve[nixl]"), NCCL: ("torch", "torch")}
_BLOCK_UNIT_BYTES = 64
_TINY = {"blocks": "1,4", "block_bytes": 2**16, "rounds": 2, "min_pool_bytes": 2**20}


@dataclass(frozen=True, slots=True)
class KvBenchSettings:
    """Settings of `baton bench kv`."""

    transports: str = setting(_ALL, "transports to measure: all, or some of shm,zmq,nixl,nccl")
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
    """What will be measured. `missing`: why transports that were not asked for by name cannot be."""

    settings: KvBenchSettings
    transports: tuple[str, ...]
    missing: dict[str, str]
    blocks: tuple[int, ...]
    checksums: tuple[str, ...]
    cores: Cores


def plan(settings: KvBenchSettings) -> Plan:
    """Resolve settings on this machine. Raises `InvalidSetting`."""
    if settings.quick:  # what was left at its default becomes tiny
        given, defaults = dataclasses.asdict(settings), dataclasses.asdict(KvBenchSettings())
        changes = {name: value for name, value in _TINY.items() if given[name] == defaults[name]}
        settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    if settings.block_bytes <= 0 or settings.block_bytes % _BLOCK_UNIT_BYTES:
        raise InvalidSetting(f"--block-bytes {settings.block_bytes} is not a multiple of {_BLOCK_UNIT_BYTES}")
    require_at_least(settings, rounds=1)
    if settings.plot and importlib.util.find_spec("matplotlib") is None:
        raise InvalidSetting("--plot: matplotlib is not installed: pip install 'baton-serve[bench]'")
    checksums = lists.names(settings.checksum, "--checksum", CHECKSUMS)
    if not checksums:
        raise InvalidSetting("--checksum names nothing")
    transports, missing = _transports(settings.transports)
    blocks = lists.numbers(settings.blocks, "--blocks")
    return Plan(settings, transports, missing, blocks, checksums, _cores(settings.cores))


def _transports(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """(available, {missing: why})."""
    missing = {
        name: f"{package} is not installed: pip install '{requirement}'"
        for name, (package, requirement) in _LIBRARIES.items()
        if importlib.util.find_spec(package) is None
    }
    if text == _ALL:
        return tuple(name for name in TRANSPORTS if name not in missing), missing
    chosen = lists.names(text, "--transports", TRANSPORTS)
    if not chosen:
        raise InvalidSetting("--transports names nothing")
    for name in chosen:
        if name in missing:
            raise InvalidSetting(f"--transports {name}: {missing[name]}")
    return chosen, {}


def _cores(text: str) -> Cores:
    given = lists.cores(text)
    if text and len(given) != 2:
        raise InvalidSetting(f"--cores {text}: one of the prefill and one of the decode process are needed")
    return (given[0], given[1]) if len(given) > 1 else (None, None)
