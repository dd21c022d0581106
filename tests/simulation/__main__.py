"""Runs many schedules, in all cores, or one again with everything that happened in it.

    python -m tests.simulation --schedules 1000000 --seed 0      # seeds 0 to 999,999
    python -m tests.simulation --replay 57                       # one seed, with its timeline and all log lines
    python -m tests.simulation --mixed --schedules 100000        # all nodes do any leg, preferences change all the time

Ten seeds follow each other in one world; `--replay` begins with the first of them. Prints how many were run and what
failed: the seed, the timeline and what did not hold; behind it the rest of its world is left out. Exits with 1 on any
failure, and stops after `--max-failures`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.schedule import Failure, Schedule, run_seeds

_SEEDS_PER_TASK = 200
_TELL_S = 60.0


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-failures", type=int, default=10)
    parser.add_argument("--replay", type=int, help="run this seed alone, and tell what happens")
    parser.add_argument("--mixed", action="store_true", help="mixed nodes, whose preferences change")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return _replay(options.replay, options.mixed)
    seeds = range(options.seed, options.seed + options.schedules)
    return _run(seeds, options.processes, options.max_failures, options.mixed)


class _IntoTimeline(logging.Handler):
    """Puts log lines of the programs between what happened to them."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._schedule.world.note(f"    {record.name}: {record.getMessage()}")


def _replay(seed: int, is_mixed: bool) -> int:
    schedule = Schedule(seed, is_mixed=is_mixed)
    logging.basicConfig(level=logging.INFO, handlers=[_IntoTimeline(schedule)])
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        schedule.run()
    except AssertionError as error:
        sys.stdout.write("\n".join([*schedule.world.timeline, f"does not hold: {error}", ""]))
        return 1
    sys.stdout.write("\n".join([*schedule.world.timeline, "everything holds", ""]))
    return 0


def _run(seeds: range, num_processes: int, max_failures: int, is_mixed: bool) -> int:
    begun_s = told_s = time.monotonic()
    num_run, num_failed = 0, 0
    parts = [seeds[first : first + _SEEDS_PER_TASK] for first in range(0, len(seeds), _SEEDS_PER_TASK)]
    with ProcessPoolExecutor(num_processes, initializer=_prepare) as pool:
        for part, failures in zip(parts, pool.map(partial(_run_part, is_mixed), parts), strict=True):
            num_run, num_failed = num_run + len(part), num_failed + len(failures)
            for failure in failures:
                _tell(str(failure) + "\n")
            if num_failed >= max_failures:
                pool.shutdown(cancel_futures=True)
                break
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                _tell(f"{num_run} schedules, {num_failed} failed")
    took_s = time.monotonic() - begun_s
    _tell(f"seeds {seeds.start} to {seeds.start + num_run - 1}: {num_run} schedules, {num_failed} failed")
    _tell(f"{took_s:.0f} s, {num_run / took_s:.0f} schedules/s in {num_processes} processes")
    return 1 if num_failed else 0


def _prepare() -> None:
    gc.collect()
    gc.freeze()


def _run_part(is_mixed: bool, seeds: range) -> list[Failure]:
    return run_seeds(seeds, is_mixed=is_mixed)


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
