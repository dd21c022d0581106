"""How long a deployment takes to be ready, and what its processes keep in memory: `python -m baton.bench.limits.start`.

`baton serve` is started `--rounds` times; what stands behind the flags of this command goes to it. Printed are the
seconds from the start of the command to its line "Baton ready at", and, of one more start with a pool of
`--pool-bytes`, where the resident memory of each process lies when it is ready:

- pools: its KV pool, by whose size it is known, and what it has touched of another node's;
- files: libraries and programs, which the system shares among processes and can read again;
- own: all else. Of a node that is its weights, what torch and Python need, and what is freed and kept.

`beside` is all but pools and weights, whose bytes are those of the checkpoint. On a system without /proc only times are
printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton.bench.numbers import median
from baton.bench.targets.process import descendants
from baton.engine.models.identity import find_checkpoint
from baton.runtime.child import PIPE, Child

_READY_S = 120.0
_PATIENCE_S = 10.0
_READY = b"Baton ready at"
_NODES = ("prefill_node", "decode_node", "mixed_node")
_SEGMENTS = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes of a process by where they lie."""

    name: str
    pools: int
    files: int
    own: int

    @property
    def is_node(self) -> bool:
        """Whether it holds weights."""
        return self.name in _NODES

    def beside(self, weights: int) -> int:
        """See the module."""
        return self.files + self.own - (weights if self.is_node else 0)


def resident(name: str, smaps: Iterable[str], pool_bytes: int) -> Resident:
    """From the lines of a process's smaps. A pool that no segment holds is known by its size."""
    found, kind = {"pools": 0, "files": 0, "own": 0}, "own"
    for line in smaps:
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            path = words[5].strip() if len(words) > 5 else ""
            kind = "pools" if path.startswith(_SEGMENTS) else "files" if path.startswith("/") else "own"
        elif words[0] == "Size:" and kind == "own" and 1024 * int(words[1]) >= pool_bytes:
            kind = "pools"
        elif words[0] == "Rss:":
            found[kind] += 1024 * int(words[1])
    return Resident(name, **found)


def measure(arguments: Sequence[str], pool_bytes: int = 0) -> tuple[float, list[Resident]]:
    """Start `baton serve` with `arguments`: the seconds until it is ready, and what is resident then, with a pool of
    `pool_bytes`; 0: of its own choice, and nothing is looked at. Raises `ChildFailed`."""
    begun_s = time.monotonic()
    # giving its pages takes most of a second for each GiB, so a large pool is no part of what is timed
    pool = ("--kv-cache-memory-bytes", str(pool_bytes)) if pool_bytes else ()
    child = Child("baton", "serve", *arguments, "--port", "0", *pool, stdout=PIPE)
    try:
        while not child.read_line(begun_s + _READY_S - time.monotonic()).startswith(_READY):
            continue
        ready_s = time.monotonic() - begun_s
        return ready_s, [*_all_resident(child.pid, pool_bytes)] if pool_bytes else []
    finally:
        child.end(_PATIENCE_S)


def _all_resident(pid: int, pool_bytes: int) -> Iterable[Resident]:
    for process in [psutil.Process(pid), *descendants(pid)]:
        words = process.cmdline()
        name = next((word for word in words if word in (*_NODES, "router")), "baton serve")
        smaps = Path(f"/proc/{process.pid}/smaps")
        if smaps.exists():
            yield resident(name, smaps.read_text().splitlines(), pool_bytes)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.start", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="checkpoint; the demo model when absent")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool-bytes", type=int, default=2 * 2**30, help="more than any other memory")
    flags, serving = parser.parse_known_args(argv)
    arguments = [*([flags.model] if flags.model else []), *serving]
    seconds = sorted(measure(arguments)[0] for _ in range(flags.rounds))
    sys.stdout.write(f"ready after {seconds[0]:.2f} to {seconds[-1]:.2f} s, median {median(seconds):.2f}\n")
    folder = find_checkpoint(flags.model)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    sys.stdout.write(f"weights {weights / _MIB:.0f} MiB\n{'':14}     pools     files       own    beside   (MiB)\n")
    for each in measure(arguments, flags.pool_bytes)[1]:
        sizes = (each.pools, each.files, each.own, each.beside(weights))
        sys.stdout.write(f"{each.name:14}" + "".join(f"{size / _MIB:10.0f}" for size in sizes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
