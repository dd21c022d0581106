"""KV events of real nodes: a reader that comes when all is over knows what each of them has."""

from __future__ import annotations

import re
from functools import partial

from tests.node.kv_events.reader import Reader
from tests.system.harness import BLOCK_SIZE, Node, Relay, wait_until
from tests.system.reference import make_prompt

PLACES = re.compile(r"KV events at (tcp://\S+), replays at (tcp://\S+),")


def is_idle(node: Node) -> bool:
    return not node.unsettled()


def view_of(node: Node) -> dict[int, tuple[int, ...]]:
    """The blocks that the node is known to have, as the tokens from the beginning of their prompt on."""
    (places,) = PLACES.findall(node.err)
    with Reader(*places) as reader:
        for number, payload in reader.replay(0):
            assert number == reader.next_number
            reader.view.apply(payload)
            reader.next_number += 1
    blocks, prefixes = reader.view.blocks, dict[int, tuple[int, ...]]()
    for block_hash, block in blocks.items():
        tokens, parent = block.token_ids, block.parent
        while parent in blocks:
            tokens, parent = blocks[parent].token_ids + tokens, blocks[parent].parent
        prefixes[block_hash] = tokens
    return prefixes


def test_both_ends_of_handoffs_tell_what_they_have(llama_relay: Relay) -> None:
    prefill, decode = llama_relay.prefills[0], llama_relay.decodes[2]
    prompts = [make_prompt(3 * BLOCK_SIZE + 5, 40 + number) for number in range(12)]
    answers = llama_relay.ask_all(prompts, 4, max_tokens=2 * BLOCK_SIZE)
    for node in (prefill, decode):
        wait_until(partial(is_idle, node), "the node is idle")
        view = view_of(node)
        assert len(view) == node.metrics().value("kv_blocks", state="cached")
        assert {prompt[: 3 * BLOCK_SIZE] for prompt in prompts} & {*view.values()}
    whole = {(*prompt, *answer.token_ids)[: 5 * BLOCK_SIZE] for prompt, answer in zip(prompts, answers, strict=True)}
    assert whole & {*view_of(decode).values()}
