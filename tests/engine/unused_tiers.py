"""What tiers cost prompts that never return: `python -m tests.engine.unused_tiers`.

Engines with tiers and one without compute prompts in turns. Their pools are full, so each prompt evicts as many blocks
as it fills. Another engine without tiers shows how far chance goes. Processor time is that of the engine's thread and
of the threads of its tiers, without what a server takes in its own process.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

from baton.engine.settings import VALKEY, EngineSettings
from baton.wire.sampling import DecodingParams
from tests.engine.cache.valkey_servers import running
from tests.engine.offload_time import LINGER_S, Meter, fresh, parser_of, settings_of
from tests.measured import against, ratio, report

_NO_TIER, _AGAIN = "no tier", "no tier, once more"
_ANSWER = DecodingParams(temperature=0, max_tokens=16, ignore_eos=True)
_WARMING = 4
_Times: TypeAlias = defaultdict[str, list[float]]


def measure(settings: EngineSettings, arguments: argparse.Namespace) -> None:
    """Prompts of one length, one of each engine after the other."""
    wall_s, thread_s = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as exits:
        folders = [exits.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        server = exits.enter_context(running())
        meters = {
            name: Meter(replace(settings, **tiers), 2 * arguments.num_tokens[0])
            for name, tiers in _tiers(arguments.gib, folders, server.url).items()
        }
        take_turns(meters, _WARMING, arguments.num_tokens[0], defaultdict(list), defaultdict(list))
        before_s = {name: _tiers_s(meter) for name, meter in meters.items()}
        take_turns(meters, arguments.rounds, arguments.num_tokens[0], wall_s, thread_s)
        time.sleep(LINGER_S)
        tiers_s = {name: _tiers_s(meter) - before_s[name] for name, meter in meters.items()}
        for meter in meters.values():
            meter.core.close()
    base_s, base = sum(thread_s[_NO_TIER]), thread_s[_NO_TIER]
    cells = {
        f"{arguments.shapes}, {name}": {
            "time": against(wall_s[_NO_TIER], wall_s[name]),
            "engine's thread": f"{ratio(base, thread_s[name]):.3f}",
            "and its tiers' threads": f"{ratio(base, thread_s[name]) + tiers_s[name] / base_s:.3f}",
        }
        for name in meters
    }
    values = {"time": wall_s, "engine's thread": thread_s, "tiers' threads": tiers_s}
    report("no reuse", cells, values, arguments.to)


def take_turns(meters: Mapping[str, Meter], num_rounds: int, num_tokens: int, wall_s: _Times, thread_s: _Times) -> None:
    """Note how long prompts take, and how long the engine's thread computes."""
    chance = random.Random()
    for name in chain.from_iterable(chance.sample(list(meters), len(meters)) for _ in range(num_rounds)):
        begun_s = time.thread_time()
        wall_s[name].append(meters[name].time_s(fresh(chance, num_tokens), _ANSWER))
        thread_s[name].append(time.thread_time() - begun_s)


def _tiers_s(meter: Meter) -> float:
    """Seconds of the processor that the threads of its tiers have taken."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in meter.threads if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def _tiers(gib: float, folders: list[str], url: str) -> Mapping[str, Mapping[str, Any]]:
    """The settings of each engine. Its tiers have less room than it computes: they are full where they are used."""
    memory, server = {"kv_offloading_size": gib}, {"kv_store": VALKEY, "kv_store_url": url}
    folder, other = ({"kv_disk": each, "kv_disk_size": gib} for each in folders)
    return {
        _NO_TIER: {},
        _AGAIN: {},
        "memory": memory,
        "folder": folder,
        "server": server,
        "memory, folder and server": memory | other | server,
    }


def main() -> int:
    """Measure what the command line asks for."""
    parser = parser_of("tests.engine.unused_tiers", __doc__, (1000,), 1)
    parser.set_defaults(rounds=30, gib=0.125)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(settings_of(folder, arguments), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
