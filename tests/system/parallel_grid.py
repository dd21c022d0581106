"""Prefill nodes of m ranks and decode nodes of n, over each transport: `python -m tests.system.parallel_grid`.

`2x3` are 2 ranks in each of 3 stages, `2` are 2 ranks in one. `--prefill 8 --decode 1` has more ranks than KV heads.
Each relay is real processes on loopback over a tiny model in float32. What is compared with transformers: greedy tokens
and log probabilities of prompts of many lengths, in chunks, alone and together, again with hits in the prefix caches of
both sides, and with so little room on both sides that requests are preempted. What is counted: every byte of KV leaves
once and arrives once, whatever the numbers of ranks are. At the end nothing is left. With `--prefill-pools own` or
`--decode-pools own` ranks have pools of their own, and the bytes that each of them sends and receives are counted, too.
`--model lfm2` and `qwen3-next` have layers that keep a state. With `--kv-cache-dtype fp8` KV is rounded, which
transformers does not do: the answers are compared with those of the same sizes with shared pools, for pairs with as
many ranks in a stage (others add up in another order, and a sum is rounded to another step of fp8 where the node that
computes a preempted request again is not the one that computed it first). With `--spread 2`
nodes of several ranks have them on 2 machines, which are other addresses of loopback; over zmq, nixl and auto.

A smaller version is part of the suite: `shared_relay/test_ranks.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from baton.engine.models.checkpoint import choose_kv_dtype
from baton.engine.models.config import ModelConfig
from baton.engine.models.decoder import Decoder
from baton.engine.models.facts import load_facts
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.settings import OWN, SHARED
from baton.wire.kv_shard import KvDivision, own_layout
from baton.wire.layout import DTYPE_BYTES, STATE, KvLayout
from tests.checkpoints import make_checkpoint, write_tokenizer
from tests.engine.models.families import COMMON, make_model
from tests.system.harness import BLOCK_SIZE, Answer, Relay, start_relay
from tests.system.reference import LOGPROB_TOLERANCE, Expected, Reference, make_prompt
from tests.system.spread import machines

SIZES = ("1", "2", "4", "1x2", "2x2")
TRANSPORTS = ("shm", "zmq", "nixl")
AUTO = "auto"
_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 10, 150)
_NUM_TOKENS = 16
_NUM_BLOCKS = 21
"""Room for two of the longest requests, so that four at once preempt each other."""
_NUM_LAYERS = 3
_MODEL = {"num_attention_heads": 8, "head_dim": 16, "num_hidden_layers": _NUM_LAYERS}
"""Two stages have different numbers of layers."""
_STATES = {"vocab_size": 320, "max_position_embeddings": 512}
MODELS = ("llama", "lfm2", "qwen3-next")
_TOLERANCES = {"qwen3-next": 1e-3}
"""Of log probabilities: its recurrence, over random weights, is 3e-4 from transformers' with one rank, too."""
POOLS = (SHARED, OWN)
_ROUTER = ("--local-prefill-tokens", "0")


def compare(answers: Sequence[Answer], expected: Sequence[Expected], tolerance: float = LOGPROB_TOLERANCE) -> int:
    """The number of tokens; fails on one that differs, and on a log probability that does by more than `tolerance`."""
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids, (answer.token_ids, wanted.token_ids)
        for found, right in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert abs(found - right) <= tolerance, (found, right)
    return sum(len(answer.token_ids) for answer in answers)


def moved(relay: Relay) -> tuple[int, int, int]:
    """Blocks that D has received, and the bytes that D has received and P has sent."""
    received, sent = relay.decodes[0].metrics(), relay.prefills[0].metrics()
    return (
        received.value("kv_receive_blocks_total"),
        received.value("kv_receive_bytes_total"),
        sent.value("kv_send_bytes_total"),
    )


class Answers(Protocol):
    """Knows what is right."""

    def greedy(self, prompt: tuple[int, ...], num_tokens: int = 24) -> Expected:
        """See `Reference.greedy`."""
        ...


class Recorded:
    """See `Answers`: what a relay has said that was asked one by one."""

    def __init__(self, relay: Relay) -> None:
        self._known: dict[tuple[int, ...], Expected] = {}
        for prompts, num_tokens in questions():
            for prompt, answer in zip(prompts, relay.ask_all(prompts, 1, num_tokens, logprobs=0), strict=True):
                self._known[prompt] = Expected(answer.token_ids, answer.logprobs)

    def greedy(self, prompt: tuple[int, ...], num_tokens: int = 24) -> Expected:
        """See `Answers`."""
        return self._known[prompt].first(num_tokens)


def questions() -> list[tuple[list[tuple[int, ...]], int]]:
    """Prompts of many lengths, the same with something behind them, and more than fits at once on either side; each
    with the number of tokens that are asked for."""
    prompts = [make_prompt(length, 1) for length in _LENGTHS]
    longer = [prompt + make_prompt(5, 2) for prompt in prompts]
    many = [make_prompt(140 + index, 3) for index in range(6)]
    return [(prompts, _NUM_TOKENS), (longer, _NUM_TOKENS), (many, 40)]


def check(relay: Relay, reference: Answers, layout: KvLayout, tolerance: float = LOGPROB_TOLERANCE) -> str:
    """Ask, compare, count; what to print."""
    size = layout.block_bytes
    (prompts, _), (longer, _), (many, _) = questions()
    expected = [reference.greedy(prompt, _NUM_TOKENS) for prompt in prompts]
    num_tokens = compare(relay.ask_all(prompts, 1, _NUM_TOKENS, logprobs=0), expected, tolerance)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in _LENGTHS)
    assert moved(relay) == (num_blocks, num_blocks * size, num_blocks * size), (moved(relay), num_blocks)
    # whole blocks are cached on both sides now: only what lies behind them is computed and travels
    expected = [reference.greedy(prompt, _NUM_TOKENS) for prompt in longer]
    num_tokens += compare(relay.ask_all(longer, 1, _NUM_TOKENS, logprobs=0), expected, tolerance)
    again, _, _ = moved(relay)
    assert again - num_blocks < num_blocks, "prefix caches were not hit"
    # more than fits at once
    expected = [reference.greedy(prompt, 40) for prompt in many]
    num_tokens += compare(relay.ask_all(many, 6, 40, logprobs=0), expected, tolerance)
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


def division_of(size: str, pools: str) -> KvDivision:
    """How the ranks of a node of that size divide its blocks; with a shared pool they do not."""
    num_ranks, _, num_stages = size.partition("x")
    return KvDivision(int(num_ranks), int(num_stages or 1)) if pools == OWN else KvDivision()


def part_bytes(layout: KvLayout, sources: KvDivision, targets: KvDivision) -> int:
    """Bytes of a block that ranks of one node send to those of another: all that these store, but for what states are
    filled up with, unless both are divided alike."""
    own = [own_layout(layout, share) for share in targets.shards]
    num_filled = sum(
        each.layer_bytes(kv) - (kv.num_input_rows * kv.head_dim + kv.num_carried) * DTYPE_BYTES[layout.dtype]
        for each in own
        for kv in each.layers
        if kv.kind == STATE
    )
    return sum(each.block_bytes for each in own) - (0 if sources == targets else num_filled)


def layout_of(model: Path, kv_cache_dtype: str) -> KvLayout:
    """Of blocks of this model, whatever the number of ranks is."""
    config = load_facts(model)
    assert isinstance(config, ModelConfig)
    dtype = choose_kv_dtype(kv_cache_dtype, "float32")
    return KvLayout.of_layers(dtype, BLOCK_SIZE, Decoder(config, torch.float32, "meta", TorchOps()).layer_kvs)


def check_parts(relay: Relay, layout: KvLayout, sources: KvDivision, targets: KvDivision) -> str:
    """Compare what ranks with pools of their own have sent and received, each for itself, with the number of blocks.
    What to print."""
    received, sent = relay.decodes[0].metrics(), relay.prefills[0].metrics()
    num_bytes = received.value("kv_receive_blocks_total") * part_bytes(layout, sources, targets)
    found = received.value("kv_receive_part_bytes_total"), sent.value("kv_send_part_bytes_total")
    wanted = tuple(num_bytes * (division != KvDivision()) for division in (targets, sources))
    assert found == wanted, (found, wanted)
    return f", {num_bytes} bytes from rank to rank" if any(wanted) else ""


@dataclass(frozen=True)
class Deployment:
    """What is the same for all relays of a grid. `tolerance`: of log probabilities; `num_machines`: of each node of
    several ranks."""

    model: Path
    tolerance: float
    kv_cache_dtype: str
    num_machines: int

    @contextlib.contextmanager
    def started(
        self, folder: Path, prefill: tuple[str, str], decode: tuple[str, str], common: Sequence[str]
    ) -> Iterator[Relay]:
        """One relay. `prefill` and `decode`: size and pools of the nodes."""
        common = ("--num-blocks", str(_NUM_BLOCKS), "--max-num-batched-tokens", "40", *common)
        common += ("--kv-cache-dtype", self.kv_cache_dtype)
        with ExitStack() as opened:
            prefill_flags, decode_flags = (
                (*common, *self._ranks(opened, folder, name, *node))
                for name, node in (("prefill", prefill), ("decode", decode))
            )
            relay = start_relay(self.model, folder, prefill=[prefill_flags], decode=[decode_flags], router=_ROUTER)
            try:
                yield relay
            finally:
                relay.close()

    def _ranks(self, opened: ExitStack, folder: Path, name: str, size: str, pools: str) -> tuple[str, ...]:
        if self.num_machines > 1 and pools == OWN and size != "1":
            return *ranks_of(size), *opened.enter_context(machines(self.num_machines, self.model, folder, name))
        return *ranks_of(size), "--rank-pools", pools


def run(
    deployment: Deployment,
    reference: Reference,
    folder: Path,
    transport: str,
    prefill: tuple[str, str],
    decode: tuple[str, str],
) -> str:
    """One relay from its start to its end."""
    layout = layout_of(deployment.model, deployment.kv_cache_dtype)
    answers: Answers = reference
    if layout.has_scales:
        with deployment.started(folder / "shared", (prefill[0], SHARED), (decode[0], SHARED), ()) as relay:
            answers = Recorded(relay)
    common = ("--kv-checksum", "dot64") if OWN in (prefill[1], decode[1]) else ()
    with deployment.started(folder, prefill, decode, (*common, "--kv-transport", transport)) as relay:
        said = check(relay, answers, layout, deployment.tolerance)
        said += check_parts(relay, layout, division_of(*prefill), division_of(*decode))
        relay.stop()
    return said


def block_bytes(num_layers: int = 2) -> int:
    """Of all heads and layers of the tiny model, whatever the number of ranks: layers, keys and values, heads, tokens,
    elements, bytes of a float32."""
    return num_layers * 2 * 2 * BLOCK_SIZE * 16 * 4


def make_grid_model(folder: Path, name: str) -> Path:
    """A checkpoint of one of `MODELS`."""
    if name == "llama":
        return make_checkpoint(folder, name, changes=_MODEL)
    make_model(folder, name, {**COMMON, **_STATES})
    write_tokenizer(folder, _STATES["vocab_size"], _STATES["max_position_embeddings"])
    return folder


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
    parser.add_argument("--decode-pools", nargs="+", default=[SHARED], choices=POOLS, help="and of these")
    parser.add_argument("--transport", nargs="+", default=TRANSPORTS, choices=(*TRANSPORTS, AUTO))
    parser.add_argument("--model", default="llama", choices=MODELS)
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of the nodes")
    parser.add_argument("--spread", type=int, default=1, help="machines of each node of several ranks")
    asked = parser.parse_args(arguments)
    if asked.spread > 1:
        asked.prefill_pools, asked.decode_pools = [OWN], [OWN]
    num_wrong = 0
    with tempfile.TemporaryDirectory() as place:
        model = make_grid_model(Path(place) / "model", asked.model)
        tolerance = _TOLERANCES.get(asked.model, LOGPROB_TOLERANCE)
        deployment = Deployment(model, tolerance, asked.kv_cache_dtype, asked.spread)
        reference = Reference(model)
        prefills = itertools.product(asked.prefill, asked.prefill_pools)
        decodes = itertools.product(asked.decode, asked.decode_pools)
        pairs = itertools.product(asked.transport, prefills, decodes)
        for transport, prefill, decode in pairs:
            if asked.kv_cache_dtype != "auto" and prefill[0].partition("x")[0] != decode[0].partition("x")[0]:
                continue
            name, begin_s = f"{transport} {' '.join(prefill)} -> {' '.join(decode)}", time.monotonic()
            try:
                said = run(deployment, reference, Path(place) / name.replace(" ", ""), transport, prefill, decode)
            except AssertionError as error:
                num_wrong += 1
                said = f"WRONG: {error}"
            say(f"{name}: {said} ({time.monotonic() - begin_s:.0f} s)")
    say("all right" if not num_wrong else f"{num_wrong} were wrong")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
