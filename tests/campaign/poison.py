"""Poison requests: each node that computes one aborts. What must be true of them is judged here."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

PROMPT = (315, 314, 315, 314, 313, 315, 314, 315)
"""Nodes of a campaign abort when a step computes a prompt that begins with it. Random prompts never do."""
LONG_PROMPT = (*PROMPT, *range(40))
"""One that a prefill node computes."""
MAX_NAMES = 3
"""Two where a node that was killed starts again within 5 s, which it does not on a busy machine."""
MAX_DEATHS = 4
ABORTED = -signal.SIGABRT


def finding_of(status: int, deaths: Mapping[str, Sequence[int]]) -> str:
    """What is wrong with the end of a poison request; "" if nothing is. `deaths`: exit statuses while it was in flight,
    by the name of the node."""
    of_poison = {name: list(statuses).count(ABORTED) for name, statuses in deaths.items() if ABORTED in statuses}
    if status == 200:
        return "a poison request was answered"
    if len(of_poison) > MAX_NAMES or sum(of_poison.values()) > MAX_DEATHS:
        return f"a poison request killed {of_poison}"
    return ""
