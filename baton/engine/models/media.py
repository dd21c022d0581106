"""What computes media of one kind for a model, and what a step's tokens of media bring to a decoder.

Does not know any kind: what a model has for which is made in one place, `baton.engine.model_shard.towers_of`, and found
by the `kind` of a medium everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from baton.device.base import Array
from baton.wire.errors import InvalidRequest
from baton.wire.media import Medium, require_in_order
from baton.wire.prompt import Prompt

MediumT = TypeVar("MediumT", bound=Medium, contravariant=True)


class MediaFacts(Protocol[MediumT]):
    """What a model's files say of media of one kind."""

    @property
    def token_id(self) -> int:
        """Tokens of a medium with this id get rows."""
        ...

    @property
    def sections(self) -> Sequence[int]:
        """The number of the dimension by which each pair of a head is rotated; empty: positions have only one. The same
        for all kinds of a model."""
        ...

    def coordinates(self, medium: MediumT, places: Array) -> Sequence[Array]:
        """For each dimension where the tokens at `places` [n] of the medium lie in it, [n] each."""
        ...

    def num_positions(self, medium: MediumT) -> int:
        """The positions from the first token of the medium to the token behind it."""
        ...

    def require_fit(self, token_ids: Sequence[int], medium: MediumT) -> None:
        """Raise `InvalidRequest` unless the tokens of the medium in a prompt are those that it has to have."""
        ...


class MediaTower(Protocol[MediumT]):
    """What computes media of one kind. Used by one thread. `num_bytes`: of its weights."""

    num_bytes: int

    @property
    def facts(self) -> MediaFacts[MediumT]:
        """Those of its model."""
        ...

    def rows(self, medium: MediumT, hash_root: bytes) -> Tensor:
        """[1 + K, M, E] of a medium with payload, see `MediaRows`; the caller does not change it. What is kept is found
        with the same `hash_root` only."""
        ...


@dataclass(frozen=True, slots=True)
class MediaRows:
    """The embeddings of M tokens of media among the T tokens of a step, and rows to add behind the first K layers.

    `places`: [M] int64 among the tokens; `rows`: [1 + K, M, E]. `positions`: [T, D] int64, one for each element of a
    head, which is rotated by one of its coordinates; None where media have positions like text.
    """

    places: Tensor
    rows: Tensor
    positions: Tensor | None


def require_computed(facts: Mapping[str, MediaFacts[Any]], prompt: Prompt) -> None:
    """Raise `InvalidRequest` for a prompt whose media would fail the step they are computed in. `facts`: by the kinds
    that the node computes."""
    for kind in prompt.media_kinds.difference(facts):
        raise InvalidRequest(f"this node takes no {kind} input", "messages")
    require_in_order(prompt.media, prompt.num_tokens)
    for medium in prompt.media:
        facts[medium.kind].require_fit(prompt.token_ids, medium)
