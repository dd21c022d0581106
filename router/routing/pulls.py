"""Pulls of prefixes: what one is, how long one is expected to take, and what came of those before.

Owns the estimate for each pair of nodes, which follows what pulls between them have taken: the bytes, and what a pull
costs beside them. A pair that has none yet is expected to be as fast as a slow network; one whose pull failed, or came
too late, is left alone for a while. Counts what pulls were expected to take, and what they took. Lives on one event
loop.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.nodes.registry import Node
from baton.wire.messages.prefixes import AwaitedPrefix, Pulled

FIRST_BYTES_PER_S = 256e6
FIRST_OVERHEAD_S = 0.01
"""Of a pair that has no pull yet: a slow network, so that the first one disappoints nobody."""
_NEWEST_SHARE = 0.25
LEFT_ALONE_S, LONGEST_ALONE_S = 10.0, 60.0
"""After the first pull that failed or was late; each further one doubles it, and one that arrives begins anew."""
_MAX_PAIRS = 4096
ARRIVED, REFUSED, FAILED, LATE, CANCELLED = RESULTS = ("arrived", "refused", "failed", "late", "cancelled")
"""What a pull ends with: the prefix is there; its holder has nothing of it any more; a node could not, or is lost; it
took longer than a pull may; nobody wants it. All but the first may have brought a part."""


@dataclass(frozen=True, slots=True)
class PlannedPull:
    """`source` holds the first `num_tokens` of a prompt, which `target` is to compute and of which it has
    `num_known`. `expected_s`: how long copying the rest takes. It is waited for `patience_s`, and `token_s` longer for
    each token that has come: what computing one takes at least."""

    source: Node
    target: Node
    num_tokens: int
    num_known: int
    expected_s: float
    patience_s: float
    token_s: float

    @property
    def bound_s(self) -> float:
        """How long it is waited for at most."""
        return self.patience_s + self.token_s * (self.num_tokens - self.num_known)

    def awaited_as(self, number: int) -> AwaitedPrefix:
        """What the target is told of a pull with this attempt number."""
        return AwaitedPrefix(number, self.patience_s, self.token_s)


class ExpectedPull(NamedTuple):
    """The seconds that a pull takes, and those of them before anything has come."""

    total_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class PulledPrefix:
    """What a request has had of a pull: the first `num_tokens` of its prompt, from that node, in `took_s`. `num_new`
    of them were not there before."""

    num_tokens: int
    node_id: str
    took_s: float
    num_new: int


@dataclass(slots=True)
class _Pair:
    byte_s: float = 1 / FIRST_BYTES_PER_S
    overhead_s: float = FIRST_OVERHEAD_S
    left_alone_s: float = LEFT_ALONE_S
    avoided_until_s: float = 0.0


class PullRecords:
    """What is known of pulls, by pair of nodes. `results` counts their ends, see `RESULTS`. `num_stays`: prompts that a
    decode node has computed because it had more of them than the node that was chosen."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.num_tokens = self.num_stays = 0
        self.expected_s = self.took_s = 0.0
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def expected_of(self, source: Node, target: Node, num_bytes: int, now_s: float) -> ExpectedPull | None:
        """What a pull between the two takes. None: not now."""
        pair = self._pairs.get((source.node_id, target.node_id), _Pair())
        if now_s < pair.avoided_until_s:
            return None
        return ExpectedPull(pair.overhead_s + pair.byte_s * num_bytes, pair.overhead_s)

    def arrived(self, planned: PlannedPull, pulled: Pulled, took_s: float) -> PulledPrefix:
        """A pull has brought its prefix, so long after it was asked for."""
        self.results[ARRIVED] += 1
        num_new = max(0, pulled.num_tokens - planned.num_known)
        self.num_tokens += num_new
        self.expected_s += planned.expected_s
        self.took_s += took_s
        pair, transfer_s = self._pair_of(planned), pulled.transfer_us / 1e6
        pair.left_alone_s = LEFT_ALONE_S
        if pulled.num_bytes:
            pair.byte_s += _NEWEST_SHARE * (transfer_s / pulled.num_bytes - pair.byte_s)
        pair.overhead_s += _NEWEST_SHARE * (max(0.0, took_s - transfer_s) - pair.overhead_s)
        return PulledPrefix(pulled.num_tokens, planned.source.node_id, took_s, num_new)

    def ended(self, planned: PlannedPull, result: str, now_s: float) -> None:
        """A pull has not brought all of it."""
        self.results[result] += 1
        if result in (FAILED, LATE):
            pair = self._pair_of(planned)
            pair.avoided_until_s = now_s + pair.left_alone_s
            pair.left_alone_s = min(2 * pair.left_alone_s, LONGEST_ALONE_S)

    def _pair_of(self, planned: PlannedPull) -> _Pair:
        names = planned.source.node_id, planned.target.node_id
        if names not in self._pairs and len(self._pairs) >= _MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        return self._pairs.setdefault(names, _Pair())
