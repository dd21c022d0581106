"""The measuring itself: starts the processes, has them do one thing at a time, in turns, and keeps every sample.

Owns the order. One *session* is a pair of nodes for one transport, checksum and block size. Before anything is timed
the whole pool is handed over once, which maps every page at both ends, and every size once, into cleared blocks that
are then compared byte by byte. After that: copy, handoff, (bare NIXL write,) copy, handoff, ... through the pool, so
that nothing is in a cache because of the round before.

While a handoff is under way this process waits on a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Self

from bench.child import Child
from bench.kv.settings import Cores, Plan
from kvtransfer.transports.registry import NIXL
from wire.errors import RequestFailed, TransferFailed

_NODE, _LIMITS, _BARE = "bench.kv.node_process", "bench.kv.limits_process", "bench.kv.bare_nixl"
_SMALL_BYTES = 16 * 2**20
_MORE_ROUNDS = 10
_FIXED_COST_BLOCK_BYTES = 2**16
_LIMIT_BYTES, _QUICK_LIMIT_BYTES = 2**28, 2**22
_NUM_LIMIT_ROUNDS = 7
_NUM_HOPS, _HOP_BYTES, _HOP_PAUSE_S = 20, 300, 0.003


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured in turns, in seconds: handoffs, as many copies of as many bytes, and bare NIXL writes.

    `wall_s` is from the moment the prompt was computed until D has delivered, `let_go_s` until P's blocks are free.
    """

    transport: str
    checksum: str
    block_bytes: int
    num_blocks: int
    memcpy_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    let_go_s: list[float] = field(default_factory=list)
    bare_nixl_s: list[float] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Payload of one handoff."""
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do with `num_bytes`, in seconds, measured in turns."""

    num_bytes: int
    copy_s: list[float] = field(default_factory=list)
    copy_beside_hashing_s: list[float] = field(default_factory=list)
    hash_s: list[float] = field(default_factory=list)
    copy_and_hash_s: list[float] = field(default_factory=list)
    tcp_s: list[float] = field(default_factory=list)
    zmq_hop_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Results:
    """`cases` move blocks of the size that was asked for, `small_cases` one block of 64 KiB."""

    limits: Limits
    cases: list[Case]
    small_cases: list[Case]
    failures: dict[str, str]


def measure(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure what `plan` names; `say` hears what is going on. A transport that fails is reported, the rest goes on."""
    say("limits of the machine")
    results = Results(_measure_limits(plan), [], [], {})
    for transport in plan.transports:
        for checksum in plan.checksums:
            try:
                say(f"{transport}, checksum {checksum}")
                results.small_cases.extend(_session(plan, transport, checksum, _FIXED_COST_BLOCK_BYTES, (1,)))
                results.cases.extend(_session(plan, transport, checksum, plan.block_bytes, plan.blocks))
            except RequestFailed as error:
                results.failures[f"{transport}, {checksum}"] = str(error)
                say(f"{transport}, checksum {checksum} failed: {error}")
    return results


def _measure_limits(plan: Plan) -> Limits:
    found = Limits(_QUICK_LIMIT_BYTES if plan.is_quick else _LIMIT_BYTES)
    hashing_s = 0.03 if plan.is_quick else 0.3
    with core_limits(plan.cores, found.num_bytes) as (one, other):
        for number in range(1 + _NUM_LIMIT_ROUNDS):
            taken = found if number else Limits(found.num_bytes)  # the first round is warm-up
            taken.copy_s.append(one.ask("copy"))
            other.tell("hash_for", duration_s=hashing_s)
            taken.copy_beside_hashing_s.append(one.ask("copy"))
            other.hear()
            taken.hash_s.append(one.ask("hash"))
            taken.copy_and_hash_s.append(one.ask("copy_and_hash"))
            other.tell("receive")
            taken.tcp_s.append(one.ask("send"))
            other.hear()
            # each after a pause as between two handoffs; half of the way
            trips_s = round_trips(one, other, _NUM_HOPS, message_bytes=_HOP_BYTES, pause_s=_HOP_PAUSE_S)
            taken.zmq_hop_s.extend(trip_s / 2 for trip_s in trips_s)
    return found


@contextmanager
def core_limits(cores: Cores, num_bytes: int) -> Iterator[tuple[Child, Child]]:
    """Two connected processes that measure what cores can do. Raises `RequestFailed`."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(Child(_LIMITS, {"num_bytes": num_bytes}, cpu)) for cpu in cores)
        one.hear()
        other.hear()
        one.ask("connect", **other.ask("bind"))
        yield one, other


def round_trips(one: Child, other: Child, count: int, *, message_bytes: int, pause_s: float = 0.0) -> list[float]:
    """Seconds of so many ZMQ messages from one to the other and back."""
    other.tell("send_back", count=count)
    taken_s: list[float] = one.ask("round_trips", count=count, message_bytes=message_bytes, pause_s=pause_s)
    other.hear()
    return taken_s


def _session(plan: Plan, transport: str, checksum: str, block_bytes: int, blocks: tuple[int, ...]) -> Iterator[Case]:
    num_pool_blocks = max(*blocks, -(-plan.min_pool_bytes // block_bytes))
    with ExitStack() as stack:
        pair = stack.enter_context(NodePair(transport, checksum, num_pool_blocks, block_bytes, plan.cores))
        bare = stack.enter_context(BarePair(num_pool_blocks, block_bytes, plan.cores)) if transport == NIXL else None
        pair.hand_over(0, num_pool_blocks)
        for num_blocks in blocks:
            case = Case(transport, checksum, block_bytes, num_blocks)
            pair.hand_over_verified(0, num_blocks)
            is_small = case.num_bytes <= _SMALL_BYTES and not plan.is_quick
            # through the pool and round again
            places = cycle(range(0, max(1, num_pool_blocks - num_blocks + 1), num_blocks))
            for _ in range(plan.num_rounds * (_MORE_ROUNDS if is_small else 1)):
                case.memcpy_s.append(pair.copy(next(places), num_blocks))
                wall_s, let_go_s = pair.hand_over(next(places), num_blocks)
                case.wall_s.append(wall_s)
                case.let_go_s.append(let_go_s)
                if bare is not None:
                    case.bare_nixl_s.append(bare.write(next(places), num_blocks))
            yield case


class _TwoChildren:
    """Two processes that end together. Context manager."""

    def __init__(self, module: str, specs: Iterable[dict[str, Any]], cores: Cores) -> None:
        with ExitStack() as stack:
            self._one, self._other = (
                stack.enter_context(Child(module, spec, cpu)) for spec, cpu in zip(specs, cores, strict=True)
            )
            self._one.hear()
            self._other.hear()
            self._children = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()


class NodePair(_TwoChildren):
    """A prefill and a decode node with equal pools; `device` as torch names it, "" for the host's memory.

    Raises `RequestFailed` when one cannot be.
    """

    def __init__(
        self,
        transport: str,
        checksum: str,
        num_blocks: int,
        block_bytes: int,
        cores: Cores = (None, None),
        device: str = "",
    ) -> None:
        spec = {
            "transport": transport,
            "checksum": checksum,
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
            "device": device,
        }
        super().__init__(_NODE, [{"role": "prefill", **spec}, {"role": "decode", **spec}], cores)
        self.transport = transport
        self._num_handoffs = 0

    def hand_over(self, first: int, count: int) -> tuple[float, float]:
        """One handoff of these blocks: seconds until it was delivered, and until the sender let go of them."""
        self._num_handoffs += 1
        number = self._num_handoffs
        self._one.ask("begin", number=number, count=count)
        self._other.ask("grant", number=number, first=first, count=count, address=self._one.ask("address"))
        stamps = self._one.ask("finish", number=number, first=first, count=count)
        delivered_s = self._other.ask("delivered", number=number)
        return delivered_s - stamps["computed_s"], stamps["let_go_s"] - stamps["computed_s"]

    def hand_over_verified(self, first: int, count: int) -> None:
        """The same into blocks that were cleared. Raises `TransferFailed` when they do not hold what was sent."""
        self._other.ask("clear", first=first, count=count)
        self.hand_over(first, count)
        wrong = self._other.ask("wrong_blocks", first=first, count=count)
        if wrong:
            raise TransferFailed(f"{len(wrong)} of {count} blocks were delivered with other bytes than were sent")

    def copy(self, first: int, count: int) -> float:
        """Seconds that the prefill process takes to copy as much into memory of the same kind."""
        return float(self._one.ask("memcpy", first=first, count=count))


class BarePair(_TwoChildren):
    """Two nixl agents without Baton."""

    def __init__(self, num_blocks: int, block_bytes: int, cores: Cores) -> None:
        super().__init__(_BARE, [{"num_blocks": num_blocks, "block_bytes": block_bytes}] * 2, cores)
        try:
            self._one.ask("connect", **self._other.ask("details"))
            self.write(0, num_blocks)
        except BaseException:
            self._children.close()
            raise

    def write(self, first: int, count: int) -> float:
        """Seconds that one write takes."""
        self._other.tell("wait_for_notice")
        taken_s = float(self._one.ask("write", first=first, count=count))
        self._other.hear()
        return taken_s
