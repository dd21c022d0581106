"""The measuring itself: starts the processes, has them do one thing at a time, in turns, and keeps every sample.

Owns the order. One *session* is a pair of nodes for one transport, checksum and block size. Before anything is timed
the whole pool is handed over once, which maps every page at both ends, and every size once, into cleared blocks that
are then compared byte by byte. After that: copy, handoff, (bare NIXL write,) copy, handoff, ... through the pool, so
that nothing is in a cache because of the round before.

While a handoff is under way this process waits on a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.child import Child
from bench.kv.settings import Plan
from kvtransfer.transports.registry import NIXL
from wire.errors import RequestFailed, TransferFailed

_NODE, _LIMITS, _BARE = "bench.kv.node_process", "bench.kv.limits_process", "bench.kv.bare_nixl"
_PREFILL, _DECODE = "prefill", "decode"
_SMALL_BYTES = 16 * 2**20
_MORE_ROUNDS = 10
_NUM_HOPS = 20
_NUM_LIMIT_ROUNDS = 7


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
                results.small_cases.extend(_session(plan, transport, checksum, plan.small_block_bytes, (1,)))
                results.cases.extend(_session(plan, transport, checksum, plan.block_bytes, plan.blocks))
            except RequestFailed as error:
                results.failures[f"{transport}, {checksum}"] = str(error)
                say(f"{transport}, checksum {checksum} failed: {error}")
    return results


def _measure_limits(plan: Plan) -> Limits:
    found = Limits(plan.limit_bytes)
    spec = {"num_bytes": plan.limit_bytes}
    with ExitStack() as stack:
        one, other = (stack.enter_context(Child(_LIMITS, spec, cpu)) for cpu in plan.cores or (None, None))
        one.hear()
        other.hear()
        one.ask("connect", port=other.ask("port"))
        one.ask("zmq_connect", port=other.ask("zmq_port"))
        for number in range(1 + _NUM_LIMIT_ROUNDS):
            taken = found if number else Limits(plan.limit_bytes)  # the first round is warm-up
            taken.copy_s.append(one.ask("copy"))
            other.tell("hash_for", duration_s=plan.hashing_s)
            taken.copy_beside_hashing_s.append(one.ask("copy"))
            other.hear()
            taken.hash_s.append(one.ask("hash"))
            taken.copy_and_hash_s.append(one.ask("copy_and_hash"))
            other.tell("receive")
            taken.tcp_s.append(one.ask("send"))
            other.hear()
            other.tell("pass_on", count=_NUM_HOPS)
            taken.zmq_hop_s.extend(one.ask("hop", count=_NUM_HOPS))
            other.hear()
    return found


def _session(plan: Plan, transport: str, checksum: str, block_bytes: int, blocks: tuple[int, ...]) -> Iterator[Case]:
    num_pool_blocks = max(*blocks, -(-plan.min_pool_bytes // block_bytes))
    with ExitStack() as stack:
        pair = stack.enter_context(NodePair(plan, transport, checksum, num_pool_blocks, block_bytes))
        bare = stack.enter_context(BarePair(plan, num_pool_blocks, block_bytes)) if transport == NIXL else None
        pair.hand_over(0, num_pool_blocks)
        for num_blocks in blocks:
            case = Case(transport, checksum, block_bytes, num_blocks)
            pair.hand_over_verified(0, num_blocks)
            is_small = case.num_bytes <= _SMALL_BYTES and not plan.is_quick
            places = _Places(num_pool_blocks, num_blocks)
            for _ in range(plan.num_rounds * (_MORE_ROUNDS if is_small else 1)):
                case.memcpy_s.append(pair.copy(places.next(), num_blocks))
                wall_s, let_go_s = pair.hand_over(places.next(), num_blocks)
                case.wall_s.append(wall_s)
                case.let_go_s.append(let_go_s)
                if bare is not None:
                    case.bare_nixl_s.append(bare.write(places.next(), num_blocks))
            yield case


class _Places:
    """Where in a pool the next blocks begin: through it and round again."""

    def __init__(self, num_pool_blocks: int, num_blocks: int) -> None:
        self._num_places = max(1, num_pool_blocks // num_blocks)
        self._num_blocks = num_blocks
        self._next = 0

    def next(self) -> int:
        """The first block."""
        place, self._next = self._next, (self._next + 1) % self._num_places
        return place * self._num_blocks


class NodePair:
    """A prefill and a decode node with equal pools. Raises `RequestFailed` when one cannot be."""

    def __init__(self, plan: Plan, transport: str, checksum: str, num_blocks: int, block_bytes: int) -> None:
        self.transport = transport
        self._num_handoffs = 0
        cores = plan.cores or (None, None)
        with ExitStack() as stack:
            self._prefill, self._decode = (
                stack.enter_context(
                    Child(
                        _NODE,
                        {
                            "role": role,
                            "transport": transport,
                            "checksum": checksum,
                            "num_blocks": num_blocks,
                            "block_bytes": block_bytes,
                            "device": plan.device,
                        },
                        cpu,
                    )
                )
                for role, cpu in zip((_PREFILL, _DECODE), cores, strict=True)
            )
            self._prefill.hear()
            self._decode.hear()
            self._address = self._prefill.ask("address")
            self._children = stack.pop_all()

    def __enter__(self) -> NodePair:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    def hand_over(self, first: int, count: int) -> tuple[float, float]:
        """One handoff of these blocks: seconds until it was delivered, and until the sender let go of them."""
        self._num_handoffs += 1
        number = self._num_handoffs
        self._prefill.ask("begin", number=number, count=count)
        self._decode.ask("grant", number=number, first=first, count=count, address=self._address)
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


class BarePair:
    """Two nixl agents without Baton."""

    def __init__(self, plan: Plan, num_blocks: int, block_bytes: int) -> None:
        spec = {"num_blocks": num_blocks, "block_bytes": block_bytes}
        with ExitStack() as stack:
            cores = plan.cores or (None, None)
            self._writer, self._target = (stack.enter_context(Child(_BARE, spec, cpu)) for cpu in cores)
            self._writer.hear()
            self._target.hear()
            self._writer.ask("connect", **self._target.ask("details"))
            self.write(0, num_blocks)
            self._children = stack.pop_all()

    def __enter__(self) -> BarePair:
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    def write(self, first: int, count: int) -> float:
        """Seconds that one write takes."""
        self._target.tell("wait_for_notice")
        taken_s = float(self._writer.ask("write", first=first, count=count))
        self._target.hear()
        return taken_s
