"""What has come of a load at one rank."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[int, bool, bool], None]
"""Called with the number of blocks that have come, from the first one on, whether that is all, and whether the next one
was damaged."""


class PartProgress:
    """The part that one rank has in a load. It tells of each block that follows those before it, and once of its end.
    See `Progress`."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._came: set[int] = set()
        self._num_blocks = 0
        self._is_damaged = False
        self.is_over = False
        """Whether the store or whoever waits for the load has ended it."""

    def arrived(self, place: int) -> None:
        """The block of that place is in this rank's pool."""
        self._came.add(place)
        while self._num_blocks in self._came:
            self._num_blocks += 1
        self._tell(self._num_blocks, False, False)

    def damaged(self) -> None:
        """The next block came with wrong bytes; the store ends the load then."""
        self._is_damaged = True

    def ended(self) -> None:
        """Nothing more is written for it."""
        if not self.is_over:
            self.is_over = True
            self._tell(self._num_blocks, True, self._is_damaged)
