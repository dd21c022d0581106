"""`python -m tests.system.image_sweep`: images of every family through real processes, compared with transformers.

    python -m tests.system.image_sweep                      # all four families, about four minutes of two cores
    python -m tests.system.image_sweep --only qwen3-vl

For each a random model in float32, a router, a prefill node and two decode nodes, one of which gets KV over shm and one
over zmq. Images of many sizes alone, between texts and several in a prompt, each at both decode nodes, in chunks of 16
tokens and blocks of 8; then more at once than a pool holds, so that requests are preempted where they got their KV from
another node; then a stream whose decode node leaves, and one whose prefill node is killed; then two mixed nodes. Each
token has to be the likeliest for transformers, which is given the image itself, and its log probability within 1e-4.
At the end no node holds a block.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from baton.engine.models.vision.facts import PixtralFacts
from tests.engine.models.image_files import picture
from tests.engine.models.seeing import SEEING_FAMILIES, Seeing, make_seeing
from tests.system.harness import MODEL_NAME, Relay, start_relay
from tests.system.test_images import DECODE, NODE, ROUTER, ask, assert_same, part

_SIZES = ((100, 60), (60, 100), (28, 28), (1, 1), (13, 150), (180, 180), (57, 85))
_TEXT = {"type": "text", "text": "What is the answer to that?"}
_NUM_AT_ONCE = 8
_NUM_MOVED, _NUM_BEGUN_AGAIN = 420, 150
"""Tokens of streams whose node is lost. A move begins a tenth of a second after a node said that it leaves."""
_SMALL_POOL = ("--num-blocks", "40")
Case = tuple[list[dict[str, Any]], list[Image.Image]]


def cases(least: int) -> list[Case]:
    """Parts of a chat, and the pictures among them, all with an edge longer than `least`."""
    pictures = [picture(*size, seed) for seed, size in enumerate(_SIZES) if max(size) > least]
    found: list[Case] = [([part(each), _TEXT], [each]) for each in pictures]
    one, other = pictures[:2]
    found.append(([_TEXT, part(one), _TEXT, part(other), _TEXT], [one, other]))
    found.append(([part(other), part(one)], [other, one]))
    found.append(([part(one), part(one), _TEXT], [one, one]))
    return found


def compare(relay: Relay, seeing: Seeing, asked: Sequence[Case], num_at_once: int, max_tokens: int) -> int:
    """Ask all, and compare each. Returns the number of tokens."""
    with ThreadPoolExecutor(num_at_once) as threads:
        answers = list(threads.map(lambda case: ask(relay, case[0], max_tokens=max_tokens), asked))
    for (_, pictures), answer in zip(asked, answers, strict=True):
        assert_same(seeing, answer, pictures)
    return sum(len(answer.choices[0].token_ids) for answer in answers)


def lose_a_node(relay: Relay, seeing: Seeing, *, is_killed: bool) -> None:
    """A stream goes on with the same tokens when the decode node leaves, or the prefill node is killed."""
    image = picture(90, 90, 30 + is_killed)
    num_tokens = _NUM_BEGUN_AGAIN if is_killed else _NUM_MOVED
    ids: list[int] = []
    stream: Any = relay.client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": [part(image)]}],  # type: ignore[list-item, misc]
        temperature=0.0, max_tokens=num_tokens, stream=True, extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    is_lost = False
    for chunk in stream:
        ids += chain.from_iterable(getattr(choice, "token_ids", None) or () for choice in chunk.choices)
        if len(ids) > 2 and not is_lost:
            node = relay.prefills[0] if is_killed else busiest(relay)
            node.kill() if is_killed else node.signal(15)
            relay.nodes.remove(node)
            is_lost = True
    relay.wait_for_members()
    whole = ask(relay, [part(image)], max_tokens=num_tokens)
    assert_same(seeing, whole, [image])
    assert ids == list(whole.choices[0].token_ids)


def busiest(relay: Relay) -> Any:
    """The decode node that generates something."""
    return max(relay.decodes, key=lambda node: node.metrics().value("num_requests_running"))


def sweep(family: str, folder: Path) -> None:
    """All of one family."""
    begin_s = time.monotonic()
    seeing = make_seeing(folder / "model", family)
    asked = cases(seeing.facts.edge if isinstance(seeing.facts, PixtralFacts) else 0)
    decode = [(*NODE, *flags) for flags in DECODE]
    relay = start_relay(seeing.folder, folder / "relay", prefill=[NODE], decode=decode, router=ROUTER)
    try:
        num_tokens = compare(relay, seeing, [case for case in asked for _ in DECODE], 1, 6)
        handed = [node.metrics().value("kv_receive_delivered_total") for node in relay.decodes]
        num_tokens += compare(relay, seeing, asked, _NUM_AT_ONCE, 12)
        lose_a_node(relay, seeing, is_killed=False)
        moves = relay.router.metrics().value("relay_moves_total")
        lose_a_node(relay, seeing, is_killed=True)
        relay.settle()
        relay.stop()
    finally:
        relay.close()
    num_preemptions = small_pools(seeing, asked, folder / "small")
    mixed(seeing, asked, folder / "mixed")
    took_s = time.monotonic() - begin_s
    figures = f"handoffs over shm and zmq {handed}, moves {moves}, preemptions {num_preemptions}"
    sys.stdout.write(f"{family}: {num_tokens} tokens compared; {figures}; {took_s:.0f} s\n")
    sys.stdout.flush()


def small_pools(seeing: Seeing, asked: Sequence[Case], folder: Path) -> int:
    """More at once than the decode node has room for. Returns how often one was preempted."""
    flags = (*NODE, *_SMALL_POOL)
    relay = start_relay(seeing.folder, folder, prefill=[NODE], decode=[flags], router=ROUTER)
    try:
        compare(relay, seeing, [*asked, *asked], _NUM_AT_ONCE, 60)
        relay.settle()
        found = sum(node.metrics().value("num_preemptions_total") for node in relay.decodes)
        relay.stop()
    finally:
        relay.close()
    return found


def mixed(seeing: Seeing, asked: Sequence[Case], folder: Path) -> None:
    """Two nodes that do any leg."""
    relay = start_relay(seeing.folder, folder, prefill=(), decode=(), router=ROUTER)
    try:
        program = ("-m", "baton.node")
        relay.join(*(relay.launch("mixed", *NODE, "--role", each, script=program) for each in ("prefill", "decode")))
        compare(relay, seeing, asked, _NUM_AT_ONCE, 8)
        relay.settle()
        relay.stop()
    finally:
        relay.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.image_sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(SEEING_FAMILIES), default=tuple(SEEING_FAMILIES))
    for family in parser.parse_args(argv).only:
        with tempfile.TemporaryDirectory() as folder:
            sweep(family, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
