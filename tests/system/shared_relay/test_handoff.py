"""What is handed over: exactly the blocks that the decode node lacks, each once, and never before the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.wire.layout import KvLayout, LayerKv
from tests.system.conftest import Checkpoints, running
from tests.system.harness import BLOCK_SIZE, Node, Relay, start_relay
from tests.system.reference import Reference, make_prompt

SLOW_PREFILL = str(Path(__file__).parents[1] / "slow_prefill.py")
BLOCK_BYTES = KvLayout.of_layers("float32", BLOCK_SIZE, [LayerKv(2, 16)] * 2).block_bytes
PUSH_S = 0.15


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counters of one node, or their increases."""

    num_handoffs: int
    num_blocks: int
    num_bytes: int
    num_cached_tokens: int
    num_transferred_tokens: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.num_handoffs - earlier.num_handoffs,
            self.num_blocks - earlier.num_blocks,
            self.num_bytes - earlier.num_bytes,
            self.num_cached_tokens - earlier.num_cached_tokens,
            self.num_transferred_tokens - earlier.num_transferred_tokens,
        )


def traffic(node: Node) -> Traffic:
    """A node's counters now."""
    metrics = node.metrics()
    prefix, ended = ("kv_send", "released") if node.role == "prefill" else ("kv_receive", "delivered")
    return Traffic(
        metrics.value(f"{prefix}_{ended}_total"),
        metrics.value(f"{prefix}_blocks_total"),
        metrics.value(f"{prefix}_bytes_total"),
        metrics.value("prompt_tokens_by_source_total", source="local_cache_hit"),
        metrics.value("prompt_tokens_by_source_total", source="external_kv_transfer"),
    )


def the_active(before: dict[str, Traffic], nodes: list[Node]) -> tuple[Node, Traffic]:
    """The one node that took part in a handoff since `before`, and the increases of its counters."""
    gained = [(node, traffic(node) - before[node.name]) for node in nodes]
    active = [(node, gain) for node, gain in gained if gain.num_handoffs]
    assert len(active) == 1, f"exactly one of {gained}"
    return active[0]


def test_each_handoff_carries_what_the_decode_node_lacks(
    llama_relay: Relay, references: Callable[[str], Reference]
) -> None:
    num_blocks, num_full_blocks = 6, 5
    prompt = make_prompt(num_full_blocks * BLOCK_SIZE + 5, 31)
    expected = references("llama").greedy(prompt)
    seen: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    for _ in range(12):
        before = {node.name: traffic(node) for node in llama_relay.nodes}
        assert llama_relay.ask(prompt).token_ids == expected.token_ids
        llama_relay.settle()
        sender, sent = the_active(before, llama_relay.prefills)
        receiver, got = the_active(before, llama_relay.decodes)
        sender_caches, receiver_caches = sender is llama_relay.prefills[0], receiver is not llama_relay.decodes[1]
        num_cached = num_full_blocks if receiver_caches and receiver.name in seen else 0
        assert got.num_blocks == sent.num_blocks == num_blocks - num_cached
        assert got.num_bytes == sent.num_bytes == got.num_blocks * BLOCK_BYTES
        assert got.num_cached_tokens == num_cached * BLOCK_SIZE
        assert got.num_transferred_tokens == len(prompt) - num_cached * BLOCK_SIZE
        was_cached = sender_caches and sender.name in seen
        assert sent.num_cached_tokens == (num_full_blocks * BLOCK_SIZE if was_cached else 0)
        seen |= {sender.name, receiver.name}
        pairs.add((sender.name, receiver.name))
    assert len(pairs) == 6, "every prefill node has met every decode node"


def test_concurrent_handoffs_send_each_block_once(llama_relay: Relay) -> None:
    prompts = [make_prompt(20 + 9 * index, 600 + index) for index in range(16)]
    before = {node.name: traffic(node) for node in llama_relay.nodes}
    llama_relay.ask_all(prompts, len(prompts), max_tokens=4)
    llama_relay.settle()
    gained = {node.name: traffic(node) - before[node.name] for node in llama_relay.nodes}
    num_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)
    for nodes in (llama_relay.prefills, llama_relay.decodes):
        assert sum(gained[node.name].num_handoffs for node in nodes) == len(prompts)
        assert sum(gained[node.name].num_blocks for node in nodes) == num_blocks
        assert sum(gained[node.name].num_bytes for node in nodes) == num_blocks * BLOCK_BYTES


@pytest.fixture
def slow_relay(
    checkpoints: Checkpoints, relays: list[Relay], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    """One decode node, and a prefill node that pushes each block slowly."""
    relay = start_relay(checkpoints("llama"), tmp_path_factory.mktemp("slow-relay"), prefill=(), decode=())
    slow = relay.launch(
        "prefill", "--max-num-batched-tokens", str(BLOCK_SIZE), script=(SLOW_PREFILL, "9999", "9999", str(PUSH_S))
    )
    relay.join(slow, relay.launch("decode"))
    yield from running(relay, relays)


def test_the_first_token_does_not_wait_for_the_handoff(
    slow_relay: Relay, references: Callable[[str], Reference]
) -> None:
    prompt = make_prompt(20 * BLOCK_SIZE, 77)
    with slow_relay.open(prompt) as stream:
        stream.read(1)
        assert slow_relay.decodes[0].metrics().value("kv_receive_delivered_total") == 0
        stream.read_all()
    assert stream.answer().token_ids == references("llama").greedy(prompt).token_ids
