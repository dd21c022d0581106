"""`baton bench`: finds a benchmark and runs it; alone it lists what there is.

Owns the table of benchmarks. A benchmark's module is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import signal
from collections.abc import Callable, Sequence

from baton.runtime.command_line import CommandParser, closest

BENCHMARKS = {
    "serve": "latency, throughput and goodput of an OpenAI-compatible server under load",
    "compare": "the same load in turns on several servers, and the ratios between them",
    "sweep": "the highest rate at which a server keeps its latency goals",
    "limits": "what this machine can do, and how near an engine comes to it",
    "report": "result files as plots, as one HTML page and as tables",
    "kv": "handoffs of KV blocks between two processes, by transport, against memcpy",
    "gpu-check": "everything of the GPU path, checked and measured on one GPU",
}
"""Each with its line in the list."""


def module_of(name: str) -> str:
    """The module whose `main(arguments) -> int` runs a benchmark."""
    return f"baton.bench.{name.replace('-', '_')}.command"


def main(arguments: Sequence[str]) -> int:
    """Run `baton bench NAME ...`; returns its exit status."""
    listing = "\n".join(f"  {name:<9} {doc}" for name, doc in BENCHMARKS.items())
    parser = CommandParser(
        prog="baton bench",
        usage="baton bench NAME ...",
        description="Measure Baton, other servers, and what this machine can do.",
        epilog=f"benchmarks:\n{listing}\n\n`baton bench NAME --help` lists the settings of one benchmark.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="what to measure, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse(arguments)
    if parsed.name is None:
        print(f"benchmarks:\n{listing}")
        return 0
    if parsed.name not in BENCHMARKS:
        parser.error(f"unknown benchmark {parsed.name!r:.100}{closest(parsed.name, BENCHMARKS)}")
    # a job in the background of a script starts with the signal ignored, and a load would then run to its end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run: Callable[[Sequence[str]], int] = importlib.import_module(module_of(parsed.name)).main
    return run(parsed.arguments)
