"""The route of one attempt: the nodes that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.nodes.registry import Node


@dataclass(frozen=True, slots=True)
class Route:
    """Without a prefill node the decode node computes the prompt too. `prompt_s`: how long that is expected to take.
    `is_kept`: the decode node computes it although a prefill node could, because that serves the goals. `ttft_s`: when
    the first token is expected, where that is to be compared with what comes of it; 0: it is not. `late_s`: in so many
    seconds it could be expected to meet its goals, 0: it can now. `is_slow`: the goal between tokens is missed."""

    decode: Node
    prefill: Node | None
    prompt_s: float = 0.0
    is_kept: bool = False
    ttft_s: float = 0.0
    late_s: float = 0.0
    is_slow: bool = False
