"""What pools of the ranks' own cost a handoff: `python -m tests.system.rank_pools_cost`.

Two relays of the same sizes, one with shared pools and one with pools of their own, answer the same prompts in turns;
none is in a prefix cache, none is asked beside another. Printed for each transport: bytes of a handoff, those that
leave ranks, and the medians of its whole time and of the part that came after the prompt was computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.demo.location import checkpoint_path
from baton.engine.settings import OWN, SHARED
from tests.system.harness import Relay, start_relay
from tests.system.parallel_grid import TRANSPORTS, ranks_of, say
from tests.system.reference import make_prompt

_ROUTER = ("--local-prefill-tokens", "0")
_NODE = ("--kv-checksum", "dot64", "--no-enable-prefix-caching", "--num-threads", "1")
_NUM_WARMING = 2


def ask(relay: Relay, prompt: tuple[int, ...]) -> dict[str, Any]:
    """One prompt; what its `usage` says of the handoff."""
    answer = relay.client.completions.create(**relay.request(prompt, 2, {"stream_options": {"include_usage": True}}))
    usage: dict[str, Any] = next(chunk.usage for chunk in answer if chunk.usage is not None).to_dict()
    found: dict[str, Any] = usage["kv_transfer"]
    return found


def measure(model: Path, folder: Path, transport: str, size: str, num_tokens: int, rounds: int) -> None:
    """One transport, in turns; prints a line for each kind of pools."""
    flags = {
        pools: (*_NODE, *ranks_of(size), "--rank-pools", pools, "--kv-transport", transport) for pools in (SHARED, OWN)
    }
    relays: dict[str, Relay] = {}
    try:
        for pools, each in flags.items():
            relays[pools] = start_relay(model, folder / pools, prefill=[each], decode=[each], router=_ROUTER)
        found: dict[str, list[dict[str, Any]]] = {pools: [] for pools in relays}
        for index in range(rounds + _NUM_WARMING):
            for pools, relay in relays.items():
                found[pools].append(ask(relay, make_prompt(num_tokens, index)))
        for pools, relay in relays.items():
            told = found[pools][_NUM_WARMING:]
            whole, exposed = (statistics.median(each[name] for each in told) for name in ("transfer_ms", "exposed_ms"))
            parts = relay.prefills[0].metrics().value("kv_send_part_bytes_total") // len(found[pools])
            say(
                f"{transport} {size} {pools}: {told[0]['bytes']} bytes, {parts} from rank to rank; "
                f"{whole:.2f} ms, {exposed:.2f} ms exposed"
            )
    finally:
        for relay in relays.values():
            relay.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all transports."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.rank_pools_cost", description=__doc__)
    parser.add_argument("--model", type=Path, default=checkpoint_path(), help="checkpoint; the demo model")
    parser.add_argument("--size", default="2", help="ranks of all nodes; 1x2: two stages of one")
    parser.add_argument("--transport", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--tokens", type=int, default=480, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        for transport in asked.transport:
            measure(asked.model, Path(place) / transport, transport, asked.size, asked.tokens, asked.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
