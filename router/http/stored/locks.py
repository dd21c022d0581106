"""Which conversations have a response in the making at this router: a second one would not know of the first.

Lives on one event loop. Other routers of a shared folder do not see it: there the first response that ends is stored
(`Version`), and the other says that it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from baton.wire.errors import InvalidRequest

CODE = "conversation_locked"


class Locks:
    """One lock for each conversation."""

    def __init__(self) -> None:
        self._holders: Counter[tuple[str, str]] = Counter()

    def check(self, owner: str, conversation_id: str) -> None:
        """Raise `InvalidRequest` when a response is in the making."""
        if (owner, conversation_id) in self._holders:
            sentence = "another response of this conversation is in the making: try again when it has ended"
            raise InvalidRequest(sentence, "conversation", CODE)

    @contextmanager
    def held(self, owner: str, conversation_id: str, is_resumed: bool) -> Iterator[None]:
        """Hold the lock. One that resumes its stream need not wait for itself. Raises as `check`."""
        if not is_resumed:
            self.check(owner, conversation_id)
        key = (owner, conversation_id)
        self._holders[key] += 1
        try:
            yield
        finally:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
