"""Media of a prompt: what stands among its tokens and is no text, whatever it shows or sounds like.

Owns what media of every kind are between programs: the place of their tokens, the payload of which a model computes
them, the digest by which caches know it, and how much of it a request may have. Does not know any kind: those are
listed in `baton.wire.prompt`.

Invariants: a payload fits its medium and the digest, or the medium cannot be constructed. Whoever computes a prompt has
the payloads; whoever gets its KV has media without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from baton.wire.codec import Bounds, Length
from baton.wire.errors import InvalidMessage

MAX_MEDIA = 64
"""Of one request."""
MAX_PAYLOAD_BYTES = 11 * 2**20
"""Of all media of a request: they travel in one message, beside the token ids."""
DIGEST_BYTES = 16
_PLACE_BYTES = 3


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Medium(ABC):
    """What stands in the tokens start .. start + num_tokens - 1 of a prompt. `digest`: of all that a model computes of
    it. `payload`: empty where only its KV is of use.

    `kind`: as `--limit-mm-per-prompt` and nodes name it. `kind_number`: one byte, of this kind alone."""

    kind: ClassVar[str]
    kind_number: ClassVar[int]

    start: Annotated[int, Bounds(0, 2 ** (8 * _PLACE_BYTES) - 1)]
    num_tokens: Annotated[int, Bounds(1, 2**20)]
    digest: Annotated[bytes, Length(DIGEST_BYTES)]
    payload: Annotated[bytes, Length(MAX_PAYLOAD_BYTES)]

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidMessage(f"the digest of a medium has {len(self.digest)} bytes")
        if self.payload:
            self.check_payload()

    @abstractmethod
    def check_payload(self) -> None:
        """Raise `InvalidMessage` unless the payload fits the other fields, and has the digest."""

    @property
    def stop(self) -> int:
        """The place behind the medium's last token in the prompt."""
        return self.start + self.num_tokens

    @property
    def mark(self) -> bytes:
        """The bytes that stand for the medium in the hash of a block that holds it, with its place there. All marks
        are equally long, and of two kinds never equal."""
        return self.digest + self.start.to_bytes(_PLACE_BYTES, "little") + bytes((self.kind_number,))

    def without_payload(self) -> Self:
        """This medium for a node that gets the KV, and needs no payload."""
        return replace(self, payload=b"")


def num_payload_bytes(media: Iterable[Medium]) -> int:
    """What these media take."""
    return sum(len(medium.payload) for medium in media)


def require_in_order(media: Sequence[Medium], num_tokens: int) -> None:
    """Raise `InvalidMessage` unless the media follow each other within `num_tokens` tokens, and are few enough."""
    place = 0
    for medium in media:
        if medium.start < place:
            raise InvalidMessage("media of a prompt lie in each other, or are out of order")
        place = medium.stop
    if place > num_tokens:
        raise InvalidMessage(f"a medium ends at token {place} of a prompt of {num_tokens}")
    if num_payload_bytes(media) > MAX_PAYLOAD_BYTES:
        raise InvalidMessage(f"the media of a prompt have more than {MAX_PAYLOAD_BYTES} bytes")
