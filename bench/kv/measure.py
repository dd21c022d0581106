"""What `baton bench kv` measures: its settings, the processes, one thing at a time in turns, and every sample.

Owns the order. One *session* is a pair of nodes for one transport, checksum and block size. Before anything is timed
the whole pool is handed over once, which maps every page at both ends, and every size once, into cleared blocks that
are then compared byte by byte. After that: copy, handoff, copy, handoff, ... through the pool, so that nothing is in a
cache because of the round before.

While a handoff is under way this process waits on a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal

from baton.bench.arguments import cores_in, names_in, numbers_in
from baton.bench.child import Child
from baton.bench.facts import Facts
from baton.kvtransfer.integrity import CHECKSUMS
from baton.kvtransfer.transports.registry import NIXL, SHM, ZMQ
from baton.runtime.ranges import BYTES, COUNT
from baton.runtime.settings import setting
from baton.wire.errors import InvalidSetting, RequestFailed, TransferFailed

TRANSPORTS = (SHM, ZMQ, NIXL)
"""Those that carry pools in host memory."""
Cores = tuple[int, int] | tuple[None, None]
"""Of two processes; None: any."""
_BLOCK_UNIT_BYTES = 64
_NODE = "baton.bench.kv.node_process"
_SMALL_BYTES, _MORE_ROUNDS = 16 * 2**20, 10


@dataclass(frozen=True, slots=True)
class KvBenchSettings:
    transports: str = setting("shm,zmq", "transports to measure: some of shm,zmq,nixl")
    blocks: str = setting("1,8,64,512", "sizes of handoffs in blocks")
    block_bytes: int = setting(2**20, "bytes of a block, a multiple of 64", allowed=BYTES)
    checksum: str = setting("xxh3,none", "measure with and without checksums: some of xxh3,dot64,none")
    rounds: int = setting(15, "handoffs of each size; ten times as many where one is small", allowed=COUNT)
    cores: str = setting("", "cores of the prefill and the decode process: P,D; empty: the first two of this process")
    min_pool_bytes: int = setting(
        2**28, "smallest pool; handoffs move through it, so that caches stay cold", allowed=BYTES
    )
    json: str = setting("", "file for every sample, with the command and the machine")


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be measured."""

    settings: KvBenchSettings
    transports: tuple[str, ...]
    blocks: tuple[int, ...]
    checksums: tuple[str, ...]
    cores: Cores


def plan(settings: KvBenchSettings) -> Plan:
    """Resolve settings on this machine. Raises `InvalidSetting`."""
    if settings.block_bytes % _BLOCK_UNIT_BYTES:
        raise InvalidSetting(f"--block-bytes {settings.block_bytes} is not a multiple of {_BLOCK_UNIT_BYTES}")
    transports = names_in(settings.transports, "--transports", TRANSPORTS)
    checksums = names_in(settings.checksum, "--checksum", CHECKSUMS)
    for flag, names in (("--transports", transports), ("--checksum", checksums)):
        if not names:
            raise InvalidSetting(f"{flag} names nothing")
    cores = cores_in(settings.cores)
    if settings.cores and len(cores) != 2:
        raise InvalidSetting(f"--cores {settings.cores}: one of the prefill and one of the decode process are needed")
    pinned: Cores = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    blocks = numbers_in(settings.blocks, "--blocks")
    return Plan(settings, transports, blocks, checksums, pinned)


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured in turns, in seconds: handoffs, and as many copies of as many bytes.

    `wall_s` is from the moment the prompt was computed until D has delivered, `let_go_s` until P's blocks are free.
    """

    transport: str
    checksum: str
    block_bytes: int
    num_blocks: int
    memcpy_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    let_go_s: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class KvDocument:
    """A result of `baton bench kv`: what was measured, and why a transport with a checksum was not."""

    kind: Literal["kv"] = field(default="kv", kw_only=True)
    facts: Facts
    cases: list[Case] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def measure(plan: Plan, document: KvDocument, say: Callable[[str], None]) -> None:
    """Put what `plan` names into `document`; `say` hears what is next. A transport may fail, and the rest goes on."""
    for transport in plan.transports:
        for checksum in plan.checksums:
            try:
                say(f"{transport}, checksum {checksum}")
                document.cases.extend(session(plan, transport, checksum))
            except RequestFailed as error:
                document.failures[f"{transport}, {checksum}"] = str(error)
                say(f"{transport}, checksum {checksum} failed: {error}")


def session(plan: Plan, transport: str, checksum: str) -> Iterator[Case]:
    """One pair of nodes, and a case for each size. Raises `RequestFailed`."""
    settings, blocks = plan.settings, plan.blocks
    block_bytes = settings.block_bytes
    num_pool_blocks = max(*blocks, -(-settings.min_pool_bytes // block_bytes))
    with node_pair(transport, checksum, num_pool_blocks, block_bytes, plan.cores) as pair:
        pair.hand_over(0, num_pool_blocks)
        for num_blocks in blocks:
            case = Case(transport, checksum, block_bytes, num_blocks)
            pair.hand_over_verified(0, num_blocks)
            is_small = case.num_bytes <= _SMALL_BYTES
            # through the pool and round again
            places = cycle(range(0, max(1, num_pool_blocks - num_blocks + 1), num_blocks))
            for _ in range(settings.rounds * (_MORE_ROUNDS if is_small else 1)):
                case.memcpy_s.append(pair.copy(next(places), num_blocks))
                wall_s, let_go_s = pair.hand_over(next(places), num_blocks)
                case.wall_s.append(wall_s)
                case.let_go_s.append(let_go_s)
            yield case


class NodePair:
    """A prefill and a decode node with equal pools, see `node_pair`."""

    def __init__(self, prefill: Child, decode: Child) -> None:
        self._prefill, self._decode = prefill, decode
        self._num_handoffs = 0

    def hand_over(self, first: int, count: int) -> tuple[float, float]:
        """One handoff of these blocks: seconds until it was delivered, and until the sender let go of them."""
        self._num_handoffs += 1
        number, address = self._num_handoffs, self._prefill.ask("begin", number=self._num_handoffs, count=count)
        self._decode.ask("grant", number=number, first=first, count=count, address=address)
        stamps = self._prefill.ask("finish", number=number, first=first, count=count)
        delivered_s = self._decode.ask("delivered", number=number)
        return delivered_s - stamps["computed_s"], stamps["let_go_s"] - stamps["computed_s"]

    def hand_over_verified(self, first: int, count: int) -> None:
        """The same into blocks that were cleared. Raises `TransferFailed` when they do not hold what was sent."""
        self._decode.ask("clear", first=first, count=count)
        self.hand_over(first, count)
        wrong = self._decode.ask("wrong_blocks", first=first, count=count)
        if wrong:
            raise TransferFailed(f"{len(wrong)} of {count} blocks were delivered with other bytes than were sent")

    def copy(self, first: int, count: int) -> float:
        """Seconds that the prefill process takes to copy as much into memory of the same kind."""
        return float(self._prefill.ask("memcpy", first=first, count=count))


@contextmanager
def node_pair(
    transport: str, checksum: str, num_blocks: int, block_bytes: int, cores: Cores = (None, None), device: str = ""
) -> Iterator[NodePair]:
    """Both nodes; `device` is where their pools lie as torch names it, "" for the host's memory.

    Raises `RequestFailed` when one cannot be.
    """
    pool = {"num_blocks": num_blocks, "block_bytes": block_bytes, "device": device}
    specs = [{"role": role, "transport": transport, "checksum": checksum, **pool} for role in ("prefill", "decode")]
    # they start at the same time, each on its core, and end together
    with Child(_NODE, specs[0], cores[0]) as prefill, Child(_NODE, specs[1], cores[1]) as decode:
        prefill.hear()
        decode.hear()
        yield NodePair(prefill, decode)
