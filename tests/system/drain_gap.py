"""`python -m tests.system.drain_gap`: how long a stream pauses when its decode node is drained, on real processes.

Starts a router, a prefill node and two decode nodes. Each round streams a prompt undisturbed, streams it again and
drains the node that generates, and compares the tokens; then the drained node is started anew. The longest pause of the
moved stream stands beside that of the undisturbed one, because on a busy machine every stream pauses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.system.harness import Answer, Node, Relay, Stream, start_relay
from tests.system.reference import make_prompt

NUM_BEFORE = 50
"""Tokens that a stream has before its node is drained."""


def main() -> None:
    """Measure, and write a line for each round and one for all."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.drain_gap", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint with at least 4096 positions; a tiny one by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=2000)
    parser.add_argument("--kv-transport", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drain-gap-") as folder:
        model = options.model or make_checkpoint(Path(folder) / "tiny", "llama", max_position=4096)
        flags = ("--kv-transport", options.kv_transport)
        relay = start_relay(model, Path(folder), prefill=(flags,), decode=(flags, flags))
        try:
            rounds = [_round(relay, number, options, flags) for number in range(options.rounds)]
        finally:
            relay.close()
    undisturbed, moved = (statistics.median(each) for each in zip(*rounds, strict=True))
    _say(f"median of the longest pauses: moved {moved:.1f} ms, undisturbed {undisturbed:.1f} ms")


def _round(relay: Relay, number: int, options: argparse.Namespace, flags: tuple[str, ...]) -> tuple[float, float]:
    """The longest pauses of an undisturbed and of a moved stream, in milliseconds."""
    prompt = make_prompt(options.prompt_tokens, number)
    undisturbed_ms, expected, _ = _stream(relay, prompt, options.output_tokens, drains=False)
    num_moved = relay.router.metrics().value("relay_moves_total")
    moved_ms, answer, left = _stream(relay, prompt, options.output_tokens, drains=True)
    if answer.token_ids != expected.token_ids:
        sys.exit(f"round {number}: the tokens of the moved stream differ")
    if relay.router.metrics().value("relay_moves_total") != num_moved + 1:
        sys.exit(f"round {number}: the stream was not moved: give it more --output-tokens")
    assert left is not None
    status = left.wait_exit()
    relay.nodes.remove(left)
    _say(f"round {number}: longest pause {moved_ms:.1f} ms, undisturbed {undisturbed_ms:.1f} ms, exit status {status}")
    relay.add("decode", *flags)
    return undisturbed_ms, moved_ms


def _stream(
    relay: Relay, prompt: tuple[int, ...], num_tokens: int, *, drains: bool
) -> tuple[float, Answer, Node | None]:
    """The longest pause after the first tokens, in milliseconds, the answer, and the node that was drained."""
    with ThreadPoolExecutor(1) as aside, relay.open(prompt, num_tokens) as stream:
        stream.read(NUM_BEFORE)
        left = aside.submit(_drain_busy, relay) if drains else None
        stream.read_all()
        return _longest_pause_s(stream) * 1000, stream.answer(), left.result() if left is not None else None


def _longest_pause_s(stream: Stream) -> float:
    return max(second - first for first, second in pairwise(stream.arrivals_s[NUM_BEFORE:]))


def _drain_busy(relay: Relay) -> Node:
    (busy,) = (node for node in relay.decodes if node.metrics().value("num_requests_running"))
    body, headers = json.dumps({"node": busy.name}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{relay.router.address}/admin/drain", body, headers)).close()
    return busy


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
