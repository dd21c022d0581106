"""How many prefill and decode nodes `baton serve` starts where nobody has said it, and why.

Owns the rule, and the sentence that tells it. Does not know which cores and accelerators a node then gets
(`baton.launch.placement`). What was asked for is never changed; docs/guides/split_or_not.md has the measurements behind
the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class Layout:
    """The numbers of nodes. `reason`: why nobody had to ask for them, and how to ask for others; "" if somebody has."""

    num_prefill: int
    num_decode: int
    reason: str = ""


ONE_NODE = Layout(
    0,
    1,
    "one node computes prompts and answers, because two would take one device from each other "
    "(--prefill 1: two all the same)",
)
SPLIT = Layout(
    1, 1, "a prefill node and a decode node, because each has a device of its own (--prefill 0: one for both)"
)


def asked_layout(num_prefill: int | None, num_decode: int | None) -> Layout:
    """The nodes of which somebody has asked for some, or for how they are: of a kind that was not named there is
    one."""
    return Layout(1 if num_prefill is None else num_prefill, 1 if num_decode is None else num_decode)


def chosen_layout(prefill: NodeSettings, decode: NodeSettings, devices: list[str]) -> Layout:
    """The nodes where nobody has asked for any. `devices`: the accelerators of this machine.

    Two nodes of one device share its computing, its memory and the reading of the weights: one node makes more tokens
    of it, and earlier first ones. A GPU for each is what makes a prompt leave running answers alone for nothing.
    """
    takes_accelerators = decode.device in ("auto", "cuda")
    num_ranks = prefill.num_ranks_here + decode.num_ranks_here
    return SPLIT if takes_accelerators and len(devices) >= num_ranks else ONE_NODE
