"""`python -m baton.bench.scale`: how the router's cost grows with nodes, requests in flight and streams.

cluster: the router's own work, nodes in its process, CPU time.
streams: many streams through a router's process over many nodes, to clients. Router, nodes and client together need
    less than two cores; with --realtime they get them whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict

from baton.bench.report.document import aligned
from baton.bench.scale.cluster import ClusterCosts, ClusterPlan, measure_cluster
from baton.bench.scale.streams import StreamsFound, StreamsPlan, measure_streams

_SIZES = ((10, 1_000), (64, 6_400), (250, 25_000), (1_000, 100_000))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        "python -m baton.bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cluster", "streams"))
    parser.add_argument("--sizes", nargs="*", metavar="NODES:REQUESTS", help="default: 10:1000 to 1000:100000")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of a prompt, half of them shared")
    parser.add_argument("--blocks-per-node", type=int, default=1_000, help="blocks that each node has cached")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--json", action="store_true", help="print JSON")
    defaults = StreamsPlan()
    parser.add_argument("--streams", type=int, default=defaults.num_streams)
    parser.add_argument("--prefill", type=int, default=defaults.num_prefills, help="prefill nodes of streams")
    parser.add_argument("--decode", type=int, default=defaults.num_decodes, help="decode nodes of streams")
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens, help="tokens of a stream")
    parser.add_argument("--interval-ms", type=float, nargs="*", default=[200.0], help="between two tokens of a stream")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="streams: run before all other programs of the machine, which wait meanwhile (needs root)",
    )
    flags = parser.parse_args(arguments)
    return _streams(flags) if flags.what == "streams" else _cluster(flags)


def _streams(flags: argparse.Namespace) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if flags.realtime:  # the router and the nodes inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    found = []
    for interval_ms in flags.interval_ms:
        plan = StreamsPlan(flags.streams, flags.prefill, flags.decode, flags.tokens, interval_ms / 1000)
        found.append(measure_streams(plan))
    print(json.dumps([asdict(each) for each in found], indent=1) if flags.json else streams_table(found))
    return 0


def _cluster(flags: argparse.Namespace) -> int:
    sizes = [tuple(map(int, size.split(":"))) for size in flags.sizes] if flags.sizes else _SIZES
    found = []
    for num_nodes, num_requests in sizes:
        plan = ClusterPlan(num_nodes, num_requests, flags.prompt_tokens, flags.blocks_per_node)
        found.append(_profiled(plan) if flags.profile else measure_cluster(plan))
    print(json.dumps([asdict(costs) for costs in found], indent=1) if flags.json else table(found))
    return 0


def _profiled(plan: ClusterPlan) -> ClusterCosts:
    profiler = cProfile.Profile()
    costs = profiler.runcall(measure_cluster, plan)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return costs


def table(found: Sequence[ClusterCosts]) -> str:
    """A column for each size."""
    names = ("nodes", *(f"{costs.plan.num_nodes:,}" for costs in found))
    rows = [
        ["requests in flight", *(f"{costs.plan.num_requests:,}" for costs in found)],
        ["a node joins, us", *(f"{costs.join_us:.0f}" for costs in found)],
        ["a route is chosen, us", *(f"{costs.decision_us:.0f}" for costs in found)],
        ["a request starts, us", *(f"{costs.start_us:.0f}" for costs in found)],
        ["a request ends, us", *(f"{costs.end_us:.0f}" for costs in found)],
        ["a token is relayed, us", *(f"{costs.token_us:.1f}" for costs in found)],
        ["a heartbeat, us", *(f"{costs.heartbeat_us:.0f}" for costs in found)],
        ["a Ping and its Pong, us", *(f"{costs.ping_us:.0f}" for costs in found)],
        ["heartbeats and Pings, share of a core", *(f"{costs.core_share:.3f}" for costs in found)],
        ["longest turn without load, ms", *(f"{costs.longest_turn_s * 1000:.1f}" for costs in found)],
        ["/metrics, ms", *(f"{costs.metrics_s * 1000:.1f}" for costs in found)],
        ["a request in flight, KiB", *(f"{costs.request_bytes / 1024:.1f}" for costs in found)],
        ["a block in the prefix index, bytes", *(f"{costs.block_bytes:.0f}" for costs in found)],
    ]
    return aligned(names, rows)


def streams_table(found: Sequence[StreamsFound]) -> str:
    """A column for each pace."""
    names = ("tokens/s", *(f"{each.tokens_per_s:,.0f}" for each in found))
    rows = [
        ["streams", *(f"{each.plan.num_streams:,}" for each in found)],
        ["nodes", *(f"{each.plan.num_prefills + each.plan.num_decodes:,}" for each in found)],
        ["a token's way, p50, ms", *(f"{each.way_p50_s * 1000:.1f}" for each in found)],
        ["a token's way, p99, ms", *(f"{each.way_p99_s * 1000:.1f}" for each in found)],
        ["event loop lag, p99 below, ms", *(f"{each.lag_p99_s * 1000:.0f}" for each in found)],
        ["event loop lag by own work, worst, ms", *(f"{each.lag_worst_own_s * 1000:.0f}" for each in found)],
        ["router CPU for a token, us", *(f"{each.cpu_us:.0f}" for each in found)],
        ["router CPU until a stream runs, us", *(f"{each.start_us:.0f}" for each in found)],
        ["tokens/s at 0.7 of a core", *(f"{0.7e6 / each.cpu_us:,.0f}" for each in found)],
        ["router, share of a core", *(f"{each.core_share:.2f}" for each in found)],
        ["the same without streams", *(f"{each.idle_share:.3f}" for each in found)],
    ]
    return aligned(names, rows)


if __name__ == "__main__":
    sys.exit(main())
