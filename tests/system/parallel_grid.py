"""Prefill nodes of m ranks and decode nodes of n, over each transport: `python -m tests.system.parallel_grid`.

`2x3` are 2 ranks in each of 3 stages, `2` are 2 ranks in one. `--prefill 8 --decode 1` has more ranks than KV heads.
Each relay is real processes on loopback over a tiny model in float32. What is compared with transformers: greedy tokens
and log probabilities of prompts of many lengths, in chunks, alone and together, again with hits in the prefix caches of
both sides, and with so little room on both sides that requests are preempted. What is counted: every byte of KV leaves
once and arrives once, whatever the numbers of ranks are. At the end nothing is left. With `--prefill-pools own` or
`--decode-pools own` ranks have pools of their own, and the bytes that each of them sends and receives are counted, too.

A smaller version is part of the suite: `shared_relay/test_ranks.py`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.settings import OWN, SHARED
from tests.checkpoints import make_checkpoint
from tests.system.harness import BLOCK_SIZE, Answer, Relay, start_relay
from tests.system.reference import LOGPROB_TOLERANCE, Expected, Reference, make_prompt
from wire.kv_share import KvDivision, own_layout
from wire.layout import KvLayout, LayerKv

SIZES = ("1", "2", "4", "1x2", "2x2")
TRANSPORTS = ("shm", "zmq", "nixl")
_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 10, 150)
_NUM_TOKENS = 16
_NUM_BLOCKS = 21
"""Room for two of the longest requests, so that four at once preempt each other."""
_NUM_LAYERS = 3
_MODEL = {"num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": _NUM_LAYERS}
"""Two stages have different numbers of layers."""
POOLS = (SHARED, OWN)
_ROUTER = ("--local-prefill-tokens", "0")


def compare(answers: Sequence[Answer], expected: Sequence[Expected]) -> int:
    """The number of tokens; fails on one that differs."""
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids, (answer.token_ids, wanted.token_ids)
        for found, right in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert abs(found - right) <= LOGPROB_TOLERANCE, (found, right)
    return sum(len(answer.token_ids) for answer in answers)


def moved(relay: Relay) -> tuple[int, int, int]:
    """Blocks that D has received, and the bytes that D has received and P has sent."""
    received, sent = relay.decodes[0].metrics(), relay.prefills[0].metrics()
    return (
        received.value("kv_receive_blocks_total"),
        received.value("kv_receive_bytes_total"),
        sent.value("kv_send_bytes_total"),
    )


def check(relay: Relay, reference: Reference) -> str:
    """Ask, compare, count; what to print."""
    size = block_bytes(_NUM_LAYERS)
    prompts = [make_prompt(length, 1) for length in _LENGTHS]
    expected = [reference.greedy(prompt, _NUM_TOKENS) for prompt in prompts]
    num_tokens = compare(relay.ask_all(prompts, 1, _NUM_TOKENS, logprobs=0), expected)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in _LENGTHS)
    assert moved(relay) == (num_blocks, num_blocks * size, num_blocks * size), (moved(relay), num_blocks)
    # whole blocks are cached on both sides now: only what lies behind them is computed and travels
    longer = [prompt + make_prompt(5, 2) for prompt in prompts]
    expected = [reference.greedy(prompt, _NUM_TOKENS) for prompt in longer]
    num_tokens += compare(relay.ask_all(longer, 1, _NUM_TOKENS, logprobs=0), expected)
    again, _, _ = moved(relay)
    assert again - num_blocks < num_blocks, "prefix caches were not hit"
    # more than fits at once, on either side
    many = [make_prompt(140 + index, 3) for index in range(6)]
    expected = [reference.greedy(prompt, 40) for prompt in many]
    num_tokens += compare(relay.ask_all(many, 6, 40, logprobs=0), expected)
    relay.settle()
    blocks, received, sent = moved(relay)
    assert received == blocks * size == sent, (blocks, received, sent)
    preempted = sum(node.metrics().value("num_preemptions_total") for node in relay.nodes)
    assert preempted > 0, "nothing was preempted"
    return f"{num_tokens} tokens, {blocks} blocks, {received} bytes once, {preempted} preempted"


def ranks_of(size: str) -> tuple[str, ...]:
    """The flags of a node of that size."""
    num_tensor, _, num_stages = size.partition("x")
    return "--tensor-parallel-size", num_tensor, "--pipeline-parallel-size", num_stages or "1"


def divided_bytes(size: str, pools: str) -> int:
    """Bytes that all ranks of a node of that size store of a block in pools of their own; 0: it has one pool."""
    num_ranks, _, num_stages = size.partition("x")
    division = KvDivision(int(num_ranks), int(num_stages or 1))
    if pools == SHARED or division == KvDivision():
        return 0
    layout = KvLayout.of_layers("float32", BLOCK_SIZE, [LayerKv(2, 16)] * _NUM_LAYERS)
    return sum(own_layout(layout, share).block_bytes for share in division.shares)


def check_parts(relay: Relay, to_ranks: int, from_ranks: int) -> str:
    """Compare what ranks with pools of their own have sent and received, each for itself, with the number of blocks.
    What to print. `to_ranks`, `from_ranks`: see `divided_bytes`."""
    received, sent = relay.decodes[0].metrics(), relay.prefills[0].metrics()
    num_blocks = received.value("kv_receive_blocks_total")
    num_bytes = num_blocks * (to_ranks or block_bytes(_NUM_LAYERS))
    found = received.value("kv_receive_part_bytes_total"), sent.value("kv_send_part_bytes_total")
    assert found == (num_bytes if to_ranks else 0, num_bytes if from_ranks else 0), (found, num_bytes)
    return f", {num_bytes} bytes from rank to rank" if to_ranks or from_ranks else ""


def run(
    model: Path,
    reference: Reference,
    folder: Path,
    transport: str,
    prefill: tuple[str, str],
    decode: tuple[str, str],
) -> str:
    """One relay from its start to its end. `prefill` and `decode`: size and pools of the nodes."""
    checksum = ("--kv-checksum", "dot64") if OWN in (prefill[1], decode[1]) else ()
    common = (
        *checksum,
        "--num-blocks",
        str(_NUM_BLOCKS),
        "--max-num-batched-tokens",
        "40",
        "--kv-transport",
        transport,
    )
    relay = start_relay(
        model,
        folder,
        prefill=[(*common, *ranks_of(prefill[0]), "--rank-pools", prefill[1])],
        decode=[(*common, *ranks_of(decode[0]), "--rank-pools", decode[1])],
        router=_ROUTER,
    )
    try:
        said = check(relay, reference)
        said += check_parts(relay, divided_bytes(*decode), divided_bytes(*prefill))
        relay.stop()
    finally:
        relay.close()
    return said


def block_bytes(num_layers: int = 2) -> int:
    """Of all heads and layers of the tiny model, whatever the number of ranks: layers, keys and values, heads, tokens,
    elements, bytes of a float32."""
    return num_layers * 2 * 2 * BLOCK_SIZE * 16 * 4


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; 0 when every relay was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.parallel_grid", description=__doc__)
    parser.add_argument("--prefill", nargs="+", default=SIZES, help="ranks of prefill nodes")
    parser.add_argument("--decode", nargs="+", default=SIZES, help="ranks of decode nodes")
    parser.add_argument("--prefill-pools", nargs="+", default=[SHARED], choices=POOLS, help="--rank-pools of those")
    parser.add_argument("--decode-pools", nargs="+", default=[SHARED], choices=POOLS, help="and of these: zmq alone")
    parser.add_argument("--transport", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    asked = parser.parse_args(arguments)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place:
        model = make_checkpoint(Path(place) / "model", "llama", changes=_MODEL)
        reference = Reference(model)
        prefills = itertools.product(asked.prefill, asked.prefill_pools)
        decodes = itertools.product(asked.decode, asked.decode_pools)
        pairs = itertools.product(asked.transport, prefills, decodes)
        for transport, prefill, decode in pairs:
            name, begin_s = f"{transport} {' '.join(prefill)} -> {' '.join(decode)}", time.monotonic()
            try:
                said = run(model, reference, Path(place) / name.replace(" ", ""), transport, prefill, decode)
            except AssertionError as error:
                num_wrong += 1
                said = f"WRONG: {error}"
            say(f"{name}: {said} ({time.monotonic() - begin_s:.0f} s)")
    say("all right" if not num_wrong else f"{num_wrong} were wrong")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
