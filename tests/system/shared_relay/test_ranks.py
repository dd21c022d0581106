"""Nodes of two ranks, in stages or not, beside nodes of one: KV goes from either to either, and every byte of it once.

The small version of `python -m tests.system.parallel_grid`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.system.harness import BLOCK_SIZE, Relay
from tests.system.parallel_grid import block_bytes, compare
from tests.system.reference import Reference, make_prompt

_COMMON = ("--max-num-batched-tokens", "24", "--num-blocks", "64")
_STAGES = ("--pipeline-parallel-size", "2", *_COMMON)
_RANKS = ("--tensor-parallel-size", "2", *_COMMON)
_LENGTHS = (7, BLOCK_SIZE, 2 * BLOCK_SIZE + 3, 60)


def test_kv_goes_between_nodes_of_any_number_of_ranks(
    llama_relay: Relay, references: Callable[[str], Reference]
) -> None:
    added = llama_relay.join(llama_relay.launch("prefill", *_STAGES), llama_relay.launch("decode", *_RANKS))
    prefill, decode = added
    try:
        llama_relay.wait_for_members()
        # three prefill nodes and four decode nodes in turn: each pair once
        prompts = [make_prompt(_LENGTHS[number % 4] + number, 500) for number in range(12)]
        expected = [references("llama").greedy(prompt, 6) for prompt in prompts]
        compare(llama_relay.ask_all(prompts, 1, 6, logprobs=0), expected)
        llama_relay.settle()
        received, sent = decode.metrics(), prefill.metrics()
        assert received.value("kv_receive_delivered_total") == 3
        assert sent.value("kv_send_released_total") == 4
        num_blocks = received.value("kv_receive_blocks_total")
        assert received.value("kv_receive_bytes_total") == num_blocks * block_bytes()
        assert sent.value("kv_send_bytes_total") == sent.value("kv_send_blocks_total") * block_bytes()
    finally:
        for node in added:
            llama_relay.nodes.remove(node)
            node.stop()
        llama_relay.wait_for_members()
