"""What one core or one node's cores can do at most: the yardsticks of the engine's ratios, as rates.

Owns how a ceiling is measured in the process of the engine, and how large its buffers are. A rate that several ratios
were measured against is one ceiling, of all their rounds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.child import Child
from bench.limits.model_shapes import Product
from bench.limits.result import Ceiling, ceiling_of

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MIN_BUFFER_BYTES = 2**27
_QUICK_BUFFER_BYTES = 2**22
_MAX_BUFFER_BYTES = 2**31
_TIMES_CACHE = 4
_NUM_PASSES = 8
"""Over the buffers in a round: one pass takes a few milliseconds, and a moment's disturbance would be all of it."""


def last_cache_bytes(folder: Path = _CACHES) -> int:
    """Size of the largest cache of a core; 0 where the system does not tell."""
    sizes = [re.fullmatch(r"(\d+)K", file.read_text().strip()) for file in sorted(folder.glob("index*/size"))]
    return max((int(size[1]) * 2**10 for size in sizes if size), default=0)


def buffer_bytes(*, is_quick: bool) -> int:
    """Of a buffer that no cache holds: four times the largest cache, from 128 MiB to 2 GiB."""
    if is_quick:
        return _QUICK_BUFFER_BYTES
    return min(max(_MIN_BUFFER_BYTES, _TIMES_CACHE * last_cache_bytes()), _MAX_BUFFER_BYTES)


class Ceilings:
    """Measures in `child`, and keeps every round for the report."""

    def __init__(self, child: Child, num_bytes: int, num_threads: int, products: Sequence[Product]) -> None:
        self._child = child
        self._num_bytes = num_bytes
        self._num_threads = num_threads
        self._num_rows = products[0].num_rows
        self._flop = sum(product.flop for product in products)
        self._samples: dict[str, list[float]] = {}

    def copy_gb_per_s(self) -> float:
        """One thread copies memory; the payload counts once."""
        return self._gb_per_s("copy")

    def read_gb_per_s(self) -> float:
        """As many threads as the engine has read memory."""
        return self._gb_per_s("read")

    def gemm_gflop_per_s(self) -> float:
        """As many threads compute the matrix products of a chunk of a prompt, and nothing else."""
        return self._flop / float(self._child.ask("multiply")) / 1e9

    def _gb_per_s(self, command: str) -> float:
        return _NUM_PASSES * self._num_bytes / float(self._child.ask(command, num_passes=_NUM_PASSES)) / 1e9

    def keep(self, name: str, samples: Sequence[float]) -> None:
        """Rounds of the ceiling `name`, warm-up left out."""
        self._samples.setdefault(name, []).extend(samples)

    def found(self) -> list[Ceiling]:
        """The ceilings that were measured."""
        size = f"{self._num_bytes / 2**20:.0f} MiB"
        kinds = {
            "memcpy": ("GB/s", f"np.copyto of {size}, 1 thread, payload counted once"),
            "read_stream": ("GB/s", f"np.dot over the halves of {size} of float32, {self._num_threads} thread(s)"),
            "gemm": (
                "GFLOP/s",
                f"oneDNN products of all layers with {self._num_rows} rows and of the head with 1, weights packed, "
                f"{self._num_threads} thread(s)",
            ),
        }
        return [ceiling_of(name, self._samples[name], *kinds[name]) for name in kinds if name in self._samples]
