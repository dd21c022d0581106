"""The names of the choices that one leg is about.

Choices of one prompt share its legs and its handoff. To the router each is a request of its own, with an id of its own;
the handoff between the nodes goes by the name of the first.
"""

from __future__ import annotations

from baton.wire.errors import InvalidMessage
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.request_key import RequestKey


def choice_keys(request: Prefill | Decode) -> tuple[RequestKey, ...]:
    """The keys of all choices of a leg in their order, the first of which names the handoff. Raises `InvalidMessage`
    when one is named twice."""
    ids = (request.handoff_id, *request.forks)
    if len(set(ids)) < len(ids):
        raise InvalidMessage("a leg names one of its choices twice")
    return tuple(RequestKey(handoff_id, request.attempt) for handoff_id in ids)
