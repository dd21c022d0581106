"""Counts the layers that a step in flight has stored: the engine's thread counts, the transfer thread reads.

Owns one number. When a layer is counted, its KV is complete for all tokens of the step and does not change any more.
The transfer thread is only woken after it called `follow`, so a step whose blocks are not pushed layer by layer costs
the engine no system calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LayerProgress:
    """How many layers of one step have stored their KV. One thread counts, another reads.

    `layer_ends`: the offset in a block at which each layer ends, in bytes (see `KvLayout.layer_ends`).
    """

    def __init__(self, layer_ends: Sequence[int], wake: Callable[[], None]) -> None:
        self.num_done = 0
        self.is_abandoned = False
        self._layer_ends = layer_ends
        self._is_followed = False
        self._wake = wake

    @property
    def num_layers(self) -> int:
        """How many layers a block has."""
        return len(self._layer_ends)

    def end_of(self, num_layers: int) -> int:
        """How many bytes of a block its first `num_layers` layers take."""
        return self._layer_ends[num_layers - 1] if num_layers else 0

    def follow(self) -> None:
        """Have `wake` called for every layer from now on. Call this before reading `num_done`, so that no layer is
        missed.
        """
        self._is_followed = True

    def count(self) -> None:
        """Count one more layer as stored."""
        self.num_done += 1
        if self._is_followed:
            self._wake()

    def abandon(self) -> None:
        """Record that the step failed and no more layers will come. Harmless when all layers are stored."""
        if self.num_done < self.num_layers:
            self.is_abandoned = True
            if self._is_followed:
                self._wake()
