"""What a handoff moves between nodes of different sizes, and how fast a network hides it.

Owns the counting: each rank of a decode node gets the KV that it stores, each byte of it once, from a rank that has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.launch.plan.node_plan import NodePlanner, PlannedNode


@dataclass(frozen=True, slots=True)
class PlannedHandoff:
    """The handoff of a prompt of `num_tokens`.

    `num_bytes`: in all; `bytes_per_rank`: those of the decode rank that gets most. `num_links`: pairs of ranks that
    have something for each other. `hiding_bytes_per_s`: the rate that moves a chunk's KV within the time of the chunk
    after it; with less, transfers fall behind computing. `prompt_s`: the seconds of computing the prompt.
    """

    num_tokens: int
    num_bytes: int
    bytes_per_rank: int
    num_links: int
    hiding_bytes_per_s: float
    prompt_s: float


def plan_handoff(planner: NodePlanner, prefill: PlannedNode, decode: PlannedNode, num_tokens: int) -> PlannedHandoff:
    """The handoff of a prompt of so many tokens, which leaves in whole blocks."""
    blocks, size = decode.blocks_for(num_tokens), decode.block_size
    chunk = min(prefill.max_chunk, num_tokens)
    # the first chunk is computed fastest: later ones attend to more
    chunk_bytes = decode.blocks_for(chunk) * size * decode.kv_bytes_per_token_total
    return PlannedHandoff(
        num_tokens=num_tokens,
        num_bytes=round(blocks * size * decode.kv_bytes_per_token_total),
        bytes_per_rank=round(blocks * size * decode.kv_bytes_per_token),
        num_links=_num_links(planner.config.num_kv_heads, prefill, decode),
        hiding_bytes_per_s=chunk_bytes / planner.chunk_s(prefill, 0, chunk),
        prompt_s=planner.prompt_s(prefill, num_tokens),
    )


def _num_links(num_kv_heads: int, prefill: PlannedNode, decode: PlannedNode) -> int:
    """With more ranks than heads several ranks have the same, and one of them sends."""
    senders, receivers = (min(node.ranks.tensor, num_kv_heads) for node in (prefill, decode))
    return len(_overlaps(prefill, decode)) * decode.ranks.tensor * max(1, senders // receivers)


def _overlaps(prefill: PlannedNode, decode: PlannedNode) -> set[tuple[int, int]]:
    """Pairs of stages that have a layer in common."""
    return set(zip(_stage_by_layer(prefill), _stage_by_layer(decode), strict=True))


def _stage_by_layer(node: PlannedNode) -> list[int]:
    return [stage for stage, size in enumerate(node.stages) for _ in range(size.layout.num_layers)]
