"""Counts, over as many blocks as one likes: flipped bits that are found, and clean blocks that are taken for damaged.

    python -m tests.kvtransfer.proof --flips 10000 --blocks 1000000

Prints the counts for each transport and exits with 1 on any miss. Everything goes through both sides of the transfer,
their messages and a transport; flips happen on the way. `shm` has clean blocks only: nothing is between
its two ends. What a network does to the messages of `zmq` is tested with its receiver (`transports/test_tcp_zmq.py`).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kvtransfer.transports.base import Move
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault, without_faults
from tests.kvtransfer.pair import MAILBOX, MEMORY, SHM, Pair, open_pair
from tests.kvtransfer.pools import BLOCK_BYTES, BLOCK_SIZE, key_of

BLOCK_BITS = 8 * BLOCK_BYTES
_HANDOFF_BLOCKS = 200
_POOL_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """What was counted. `num_wrong`: handoffs whose delivered KV was not the prompt's, or that were not delivered."""

    transport: str
    num_blocks: int
    num_flips: int
    num_found: int
    num_wrong: int

    @property
    def is_right(self) -> bool:
        """Whether every flip was found, and nothing else."""
        return self.num_flips == self.num_found and not self.num_wrong


class Flipper:
    """Flips one bit of each block on its first way; every position of a block has its turn."""

    def __init__(self, num_flips: int) -> None:
        self.num_left = num_flips
        self.num_flips = 0
        self.positions: set[int] = set()
        self._chance = random.Random(num_flips)
        self._order: list[int] = []
        self._seen: set[tuple[RequestKey, int]] = set()

    def bit(self) -> int:
        """The next position, all of a block in a random order, then all again."""
        if not self._order:
            self._order = self._chance.sample(range(BLOCK_BITS), BLOCK_BITS)
        self.num_flips += 1
        self.num_left -= 1
        self.positions.add(self._order[-1])
        return self._order.pop()

    def plan(self, number: int, key: RequestKey, move: Move) -> Fault:
        """For a loopback network."""
        if self.num_left <= 0 or (key, move.index) in self._seen:
            return Fault()
        self._seen.add((key, move.index))
        return Fault(flipped_bits=(self.bit(),))


def hand_over(pair: Pair, num_blocks: int) -> int:
    """Hand over prompts of so many blocks altogether. Returns how many of them did not arrive as they are."""
    num_left, number, num_wrong = num_blocks, 0, 0
    while num_left > 0:
        number += 1
        key, count = key_of(number), min(num_left, _HANDOFF_BLOCKS)
        num_left -= count
        pair.decode.grant(key, count * BLOCK_SIZE, pair.prefill.peer)
        pair.prefill.prefill(key, count * BLOCK_SIZE)
        pair.until(lambda: pair.is_quiet)
        pool = pair.decode.pool
        num_wrong += key not in pool.delivered_kv or not pool.has_exactly(key)
        pool.delivered_kv.clear()
        pool.waiting.clear()
    return num_wrong


def count_flips(transport: str, num_flips: int) -> tuple[Figures, Flipper]:
    """As many blocks as flips, each damaged once."""
    flipper = Flipper(num_flips)
    with open_pair(transport, plan=flipper.plan, num_blocks=_POOL_BLOCKS) as pair:
        return _count(transport, pair, num_flips, flipper), flipper


def count_alarms(transport: str, num_blocks: int) -> Figures:
    """Clean blocks: whatever is found is a false alarm."""
    with open_pair(transport, plan=without_faults, num_blocks=_POOL_BLOCKS) as pair:
        return _count(transport, pair, num_blocks, Flipper(0))


def _count(transport: str, pair: Pair, num_blocks: int, flipper: Flipper) -> Figures:
    num_wrong = hand_over(pair, num_blocks)
    return Figures(transport, num_blocks, flipper.num_flips, pair.decode.side.counters.num_damaged_blocks, num_wrong)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="count found flips and false alarms")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # one line for each damaged handoff
    is_right = True
    for transport in (MEMORY, MAILBOX):
        begun_s = time.monotonic()
        figures = count_flips(transport, options.flips)[0]
        is_right &= figures.is_right and figures.num_flips == options.flips
        _tell(f"found {figures.num_found} of {figures.num_flips} flips", figures, begun_s)
    for transport in (MEMORY, MAILBOX, SHM):
        begun_s = time.monotonic()
        figures = count_alarms(transport, options.blocks)
        is_right &= figures.is_right
        _tell(f"{figures.num_found} false alarms", figures, begun_s)
    return 0 if is_right else 1


def _tell(found: str, figures: Figures, begun_s: float) -> None:
    took_s = time.monotonic() - begun_s
    sys.stdout.write(
        f"{figures.transport}: {found} in {figures.num_blocks} blocks, {figures.num_wrong} handoffs wrong"
        f" ({took_s:.1f} s)\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
