"""`baton bench`: finds a benchmark and runs it; alone it lists what there is.

Owns the table of benchmarks. A benchmark's module is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The module whose `main(arguments) -> int` runs it, and its line in the list."""

    module: str
    doc: str


BENCHMARKS = {
    "serve": Benchmark(
        "bench.serve.command", "latency, throughput and goodput of an OpenAI-compatible server under load"
    ),
    "compare": Benchmark(
        "bench.compare.command", "the same load in turns on several servers, and the ratios between them"
    ),
    "sweep": Benchmark("bench.sweep.command", "the highest rate at which a server keeps its latency goals"),
    "limits": Benchmark("bench.limits.command", "what this machine can do, and how near Baton comes to it"),
    "report": Benchmark("bench.report.command", "result files as plots, as one HTML page and as tables"),
    "kv": Benchmark("bench.kv.command", "handoffs of KV blocks between two processes, by transport, against memcpy"),
    "gpu-check": Benchmark("bench.gpu_check.command", "everything of the GPU path, checked and measured on one GPU"),
    "gap": Benchmark("bench.kv.gap", "what a client sees of the handoff: the gap from token 1 to token 2"),
}


def main(arguments: Sequence[str]) -> int:
    """Run `baton bench NAME ...`; returns its exit status."""
    listing = "\n".join(f"  {name:<9} {benchmark.doc}" for name, benchmark in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="baton bench",
        usage="baton bench NAME ...",
        description="Measure Baton, other servers, and what this machine can do.",
        epilog=f"benchmarks:\n{listing}\n\n`baton bench NAME --help` lists the settings of one benchmark.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", choices=list(BENCHMARKS), metavar="NAME", help="what to measure, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.name is None:
        print(f"benchmarks:\n{listing}")
        return 0
    # a job in the background of a script starts with the signal ignored, and a load would then run to its end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = cast("Callable[[Sequence[str]], int]", importlib.import_module(BENCHMARKS[parsed.name].module).main)
    return run(parsed.arguments)
