"""Under which names a nixl agent knows others: names of its own choice, one for each connection.

nixl files what it knows of another agent under the name that stands in that agent's metadata. Metadata that comes for a
known name is merged into what is there, and of damaged metadata a part is kept. A peer makes its metadata itself, so by
another peer's name it could spoil that one's connections for good. Therefore no name of a peer reaches nixl: a fresh
one is written over it, of the same length. Nobody but this agent uses it: what travels is told apart by addresses, and
by the handoff that a notice names.

Owns the place of the name in metadata, which it finds in this agent's own. Knows nothing else of nixl's format.
"""

from __future__ import annotations

import secrets

_NAME_BYTES = 16


def fresh_name() -> str:
    """A name that no agent has had."""
    return secrets.token_hex(_NAME_BYTES)


class Naming:
    """A naming for an agent called `name`, a `fresh_name`, with this metadata. Raises `ValueError` if the name is not
    in it."""

    def __init__(self, name: str, metadata: bytes) -> None:
        self._head, found, _ = metadata.partition(name.encode())
        if not found:
            raise ValueError("nixl's metadata does not say the name of its agent")

    def rename(self, name: str, metadata: bytes) -> tuple[str, bytes]:
        """(fresh name, `metadata` of the agent `name` with the fresh name in place of it). Raises `ValueError` when it
        is not the metadata of such an agent."""
        fresh, begin = fresh_name(), self._head + name.encode()
        if len(name.encode()) != len(fresh) or not metadata.startswith(begin):
            raise ValueError("its metadata belongs to another agent, or to another version of nixl")
        return fresh, self._head + fresh.encode() + metadata[len(begin) :]
