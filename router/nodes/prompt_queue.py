"""The prompts that a node was given and has not computed yet, in seconds of its own cost model.

Owns the estimate of how long a further prompt waits there, and how far such predictions can be relied on. A node
computes prompts one after the other, in the order in which they came; the first of them has been under way since the
one before it ended. Estimates are corrected by each prompt that ends, so an error does not grow.

What a prediction leaves out (the router's own time, steps that others join later, processors that are shared) shows in
the first tokens themselves: a prediction is multiplied by what nine of ten of the last ones would have needed to be
kept. The factor follows a node within a few dozen prompts, and is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_KEPT_BY = 0.9
"""The share of first tokens that are to come by the time that was predicted."""
_NUM_COMPARED, _FEWEST_COMPARED = 64, 16
_LEAST_FACTOR, _LARGEST_FACTOR = 0.5, 1.5


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """One prompt, the seconds that it is expected to take, and when it was sent. `ttft_s`: see `Route`."""

    seconds: float
    sent_s: float
    ttft_s: float


@dataclass(slots=True)
class PromptQueue:
    """The prompts that one node has yet to compute, the oldest first. Times are of one clock. `factor`: what to
    multiply a predicted TTFT by."""

    factor: float = 1.0
    _prompts: dict[QueuedPrompt, None] = field(default_factory=dict)
    _seconds: float = 0.0
    _first_begun_s: float = 0.0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_COMPARED))

    def __len__(self) -> int:
        """Prompts that are not computed."""
        return len(self._prompts)

    def add(self, seconds: float, now_s: float, ttft_s: float = 0.0) -> QueuedPrompt:
        """A prompt was sent to the node; see `QueuedPrompt`."""
        prompt = QueuedPrompt(seconds, now_s, ttft_s)
        if not self._prompts:
            self._first_begun_s, self._seconds = now_s, 0.0  # nothing is left of rounding
        self._prompts[prompt] = None
        self._seconds += seconds
        return prompt

    def computed(self, prompt: QueuedPrompt, now_s: float) -> None:
        """The first token of a prompt has come."""
        self.remove(prompt, now_s)
        if prompt.ttft_s:
            self._ratios.append((now_s - prompt.sent_s) / prompt.ttft_s)
            if len(self._ratios) >= _FEWEST_COMPARED:
                needed = sorted(self._ratios)[int(_KEPT_BY * len(self._ratios))]
                self.factor = min(max(needed, _LEAST_FACTOR), _LARGEST_FACTOR)

    def remove(self, prompt: QueuedPrompt, now_s: float) -> None:
        """A prompt was computed, or nobody wants it any more."""
        is_first = prompt is next(iter(self._prompts))
        del self._prompts[prompt]
        self._seconds -= prompt.seconds
        if is_first:
            self._first_begun_s = now_s

    def wait_s(self, now_s: float) -> float:
        """How long a prompt that is sent now waits for those before it."""
        if not self._prompts:
            return 0.0
        first = next(iter(self._prompts))
        return max(0.0, self._seconds - min(first.seconds, now_s - self._first_begun_s))
