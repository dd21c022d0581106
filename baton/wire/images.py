"""Images, a kind of medium: their size and their pixels after the checkpoint's resizing.

Does not know how pixels are made, or what a model computes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, ClassVar

from baton.wire.codec import Bounds
from baton.wire.errors import InvalidMessage
from baton.wire.media import DIGEST_BYTES, Medium

MAX_EDGE = 2**14
_CHANNELS = 3

_Edge = Annotated[int, Bounds(1, MAX_EDGE)]


@dataclass(frozen=True, slots=True)
class PromptImage(Medium):
    """An image among the tokens of a prompt. Its payload are its pixels: the resized rows, 8 bits each of red, green
    and blue. `digest`: of size and pixels."""

    kind: ClassVar[str] = "image"
    kind_number: ClassVar[int] = 0

    height: _Edge
    width: _Edge

    def check_payload(self) -> None:
        """Raise `InvalidMessage` unless there are pixels for the size, with the digest."""
        if len(self.payload) != self.height * self.width * _CHANNELS:
            raise InvalidMessage(f"{len(self.payload)} bytes are no image of {self.height} x {self.width} pixels")
        if self.digest != digest_of(self.height, self.width, self.payload):
            raise InvalidMessage("the pixels of an image do not have its digest")


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """128 bits that name the pixels of an image."""
    key = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return blake2b(pixels, digest_size=DIGEST_BYTES, key=key).digest()
