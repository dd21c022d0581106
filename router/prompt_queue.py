"""The prompts that a node was given and has not computed yet, in seconds of its own cost model.

Owns the estimate of how long a further prompt waits there. A node computes prompts one after the other, in the order in
which they came; the first of them has been under way since the one before it ended. Estimates are corrected by each
prompt that ends, so an error does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """One prompt, and the seconds that it is expected to take."""

    seconds: float


@dataclass(slots=True)
class PromptQueue:
    """See the module. Times are of one clock."""

    _prompts: dict[QueuedPrompt, None] = field(default_factory=dict)
    _seconds: float = 0.0
    _first_begun_s: float = 0.0

    def __len__(self) -> int:
        """Prompts that are not computed."""
        return len(self._prompts)

    def add(self, seconds: float, now_s: float) -> QueuedPrompt:
        """A prompt was sent to the node."""
        prompt = QueuedPrompt(seconds)
        if not self._prompts:
            self._first_begun_s, self._seconds = now_s, 0.0  # nothing is left of rounding
        self._prompts[prompt] = None
        self._seconds += seconds
        return prompt

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
