"""Peers that lie to the ends of the transports: names and files, headers, metadata, notices, handshakes.

    python -m tests.kvtransfer.liars --seconds 60 --seed 1
    python -m tests.kvtransfer.liars --only nixl --seconds 30

Each victim is a real end in this process, polled by one thread as a transfer thread does, and has a good peer beside
the liars. What must hold: this process lives; no block changes but those of the good peer, which are right; and
afterwards no thread, descriptor or mapping is left, nor more than `MAX_GROWTH_BYTES`. The longest poll is told: on a
quiet machine it has to stay below 200 ms. Exits with 1 when something does not hold.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.kvtransfer.liars.liars import Liars
from tests.kvtransfer.liars.native import AtAgents, AtPairs
from tests.kvtransfer.liars.shared import AtSharedMemory, AtSlots

MAX_GROWTH_BYTES = 128 * 2**20
LIARS: dict[str, type[Liars]] = {"shm": AtSharedMemory, "shm_slots": AtSlots, "nccl": AtPairs, "nixl": AtAgents}


def attack(name: str, seed: int, is_over: Callable[[Liars], bool]) -> Liars:
    """Attack one transport until it is over. Raises `AssertionError` when something does not hold."""
    liars = LIARS[name](seed)
    try:
        liars.run(lambda: is_over(liars))
    finally:
        liars.close()
    return liars


def _held(process: psutil.Process) -> tuple[int, int, int, int]:
    """Bytes, files, threads and mapped segments of this process."""
    gc.collect()
    segments = Path("/proc/self/maps").read_text().count("/dev/shm/baton-")
    return process.memory_info().rss, process.num_fds(), process.num_threads(), segments


def _attack_for(name: str, seconds: float, seed: int) -> bool:
    """Whether everything held."""
    process = psutil.Process()
    attack(name, seed, lambda liars: liars.num_good >= 2)  # what is imported and pooled once
    before, until_s = _held(process), time.monotonic() + seconds
    try:
        liars = attack(name, seed, lambda _: time.monotonic() > until_s)
    except AssertionError as error:
        _say(f"{name}: does not hold: {error}")
        return False
    told = (
        f"{name}: {liars.num_acts} lies, {liars.num_good} good handoffs, longest poll {liars.longest_s * 1000:.0f} ms, "
        f"refused {dict(liars.refused)}"
    )
    del liars  # it maps segments of its own
    grown, *left = (now - then for now, then in zip(_held(process), before, strict=True))
    _say(f"{told}; grown by {grown / 2**20:.1f} MiB, left {left}")
    return grown < MAX_GROWTH_BYTES and all(number <= 0 for number in left)


def main(arguments: Sequence[str]) -> int:
    """Attack all of them in turn; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kvtransfer.liars")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each transport")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(LIARS))
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else list(LIARS)
    held = [_attack_for(name, options.seconds, options.seed) for name in names]
    return 0 if all(held) else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
