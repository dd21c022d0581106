"""How far the layers of the step in flight have come, told from the engine's thread to the transfer thread.

Owns one number. The KV of a layer is complete for all tokens of the step when it is counted; it does not change after.
Nobody is woken unless somebody follows: a step whose blocks are not pushed by layers costs the engine no system calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LayerProgress:
    """Layers of one step whose KV is stored. Counted by one thread, read by another.

    `layer_ends`: where each layer of a block ends, in bytes (see `KvLayout.layer_ends`); layers may differ in size.
    """

    def __init__(self, layer_ends: Sequence[int], wake: Callable[[], None]) -> None:
        self.num_done = 0
        self.is_abandoned = False
        self._layer_ends = layer_ends
        self._is_followed = False
        self._wake = wake

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return len(self._layer_ends)

    def end_of(self, num_layers: int) -> int:
        """Bytes of a block that its first `num_layers` layers take."""
        return self._layer_ends[num_layers - 1] if num_layers else 0

    def follow(self) -> None:
        """Be woken from now on. To be called before `num_done` is read: no layer is missed between the two."""
        self._is_followed = True

    def count(self) -> None:
        """One more layer is stored."""
        self.num_done += 1
        if self._is_followed:
            self._wake()

    def abandon(self) -> None:
        """The step could not be computed: nothing more will come. Harmless when it is complete."""
        if self.num_done < self.num_layers:
            self.is_abandoned = True
            if self._is_followed:
                self._wake()
