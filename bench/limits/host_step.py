"""What a decode step costs beside its kernels: `python -m baton.bench.limits.host_step [MODEL] [--batch 1] [--rounds
20]`.

One engine decodes a batch of greedy requests on one thread. Printed is the time of a step without that of its recorded
kernels, which are all of the layers and the head: what is left is planning, finding the most likely tokens, and what
the scheduler does. On a machine that others use, the lowest values say most; compare two versions in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from baton.engine.build import build_engine
from baton.engine.core import EngineCore
from baton.engine.native.library import Kernels
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

NUM_STEPS = 40
_PROMPT = tuple(range(20, 52))


class KernelTime:
    """Seconds in recorded kernels while it is `counting`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Every pool's replays count."""
        replay: Callable[..., None] = Kernels.replay

        def timed(*arguments: object) -> None:
            begun_s = time.perf_counter()
            replay(*arguments)
            self.seconds += time.perf_counter() - begun_s

        with patch.object(Kernels, "replay", timed):
            yield


def host_times(core: EngineCore, batch: int, kernels: KernelTime) -> list[float]:
    """Seconds beside the kernels, of each of `NUM_STEPS` steps."""
    keys = [RequestKey.numbered(number + 1) for number in range(batch)]
    params = DecodingParams(temperature=0.0, max_tokens=2 * NUM_STEPS, ignore_eos=True)
    for key in keys:
        core.add(key, _PROMPT, params)
    while len(core.step()) < batch:
        continue
    times = []
    for _ in range(NUM_STEPS):
        kernels.seconds, begun_s = 0.0, time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begun_s - kernels.seconds)
    for key in keys:
        core.abort(key)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m baton.bench.limits.host_step", description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="checkpoint; the demo model when absent")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights of the shape that MODEL has")
    flags = parser.parse_args(argv)
    settings = EngineSettings(model=flags.model, num_threads=1, max_num_seqs=flags.batch, load_format=flags.load_format)
    kernels = KernelTime()
    with kernels.counting():
        core = build_engine(settings, allocate_private).core
        host_times(core, flags.batch, kernels)
        times = sorted(each for _ in range(flags.rounds) for each in host_times(core, flags.batch, kernels))
    least, quarter, half = (1e6 * times[int(share * len(times))] for share in (0.0, 0.25, 0.5))
    sys.stdout.write(f"batch {flags.batch}: {least:.0f} us at least, a quarter below {quarter:.0f}, half {half:.0f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
